"""Says on standard error that something takes a while: a spinner on a terminal, a plain line elsewhere."""

from collections.abc import Generator
from contextlib import contextmanager

import click


@contextmanager
def progress(doing: str) -> Generator[None]:
    """Show `doing` for as long as the block lasts."""
    from rich.console import Console  # not for --help

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{doing} …"):
            yield
    else:
        click.echo(f"{doing} …", err=True)
        yield
