"""What everybody must know who sends text through a swarm: said once by each command that does."""

import click

PRIVACY_NOTE = "Note: the servers of a swarm can read what passes through them."


def say_privacy_note(more: str = "") -> None:
    """On standard error, beside the command's result; `more`: a sentence behind it."""
    click.echo(f"{PRIVACY_NOTE} {more}".rstrip(), err=True)
