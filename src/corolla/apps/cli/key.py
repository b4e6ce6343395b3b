"""`corolla key`: make the key of a private swarm, or one for a gateway's callers."""

import os
import stat
import sys

import click

from corolla.apps.cli.options import logging_options
from corolla.errors import BadInput


@click.group("key")
@logging_options("warning")
def command() -> None:
    """Make the key of a private swarm, or an API key for a gateway.

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


@command.command("api")
@click.argument("name")
def api(name: str) -> None:
    """Print the line of a new API key: `corolla key api alice >> api.keys`.

    The key itself is shown once, on standard error; the file holds its hash. NAME tells keys apart in logs.
    """
    from corolla.apps.gateway.keys import line_for, new_key

    key = new_key()
    click.echo(line_for(name, key))
    click.echo(f"the key of {name}, shown only now: {key}", err=True)


def _keep_private(output: int) -> None:
    """The shell made the file, open to others more often than not; nothing secret is in it yet."""
    if stat.S_ISREG(os.fstat(output).st_mode):
        try:
            os.fchmod(output, 0o600)
        except OSError as fault:
            raise BadInput(f"cannot make the key's file private: {fault.strerror or fault}") from fault
