"""Says on standard error that something takes a while: a spinner on a terminal, a plain line elsewhere."""

from collections.abc import Generator
from contextlib import contextmanager

import click

from corolla.models.transfer import Progress, TellSometimes


@contextmanager
def progress(doing: str) -> Generator[Progress]:
    """Show `doing` for as long as the block lasts. What it gives shows how far a download is."""
    from rich.console import Console  # not for --help

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{doing} …") as status:
            yield lambda transfer: status.update(f"{doing} … {transfer}")
    else:
        click.echo(f"{doing} …", err=True)
        yield TellSometimes(lambda line: click.echo(line, err=True))
