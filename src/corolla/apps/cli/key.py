"""`corolla key`: make the key of a private swarm."""

import os
import stat
import sys

import click

from corolla.apps.cli.options import logging_options
from corolla.errors import BadInput


@click.group("key")
@logging_options("warning")
def command() -> None:
    """Make the key of a private swarm.

    Every member gets the same key file and names it with --swarm-key; without it, a peer can neither read nor write
    the swarm's records nor get an answer from its members.
    """


@command.command("new")
def new() -> None:
    """Print a new key: `corolla key new > swarm.key`.

    A file that standard output goes to is made readable by you alone first.
    """
    from corolla.net.swarm_key import new_key

    _keep_private(sys.stdout.fileno())
    click.echo(new_key().line())


def _keep_private(output: int) -> None:
    """The shell made the file, open to others more often than not; nothing secret is in it yet."""
    if stat.S_ISREG(os.fstat(output).st_mode):
        try:
            os.fchmod(output, 0o600)
        except OSError as fault:
            raise BadInput(f"cannot make the key's file private: {fault.strerror or fault}") from fault
