"""Says on standard error that something takes a while: a spinner on a terminal, a plain line elsewhere."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from corolla.models.transfer import Progress, TellSometimes


@dataclass(frozen=True, slots=True)
class Shown:
    """What shows more beside the words that stand there."""

    progress: Progress
    """How far a download is."""
    say: Callable[[str], None]
    """A sentence that stays."""


@contextmanager
def progress(doing: str) -> Generator[Shown]:
    """Show `doing` for as long as the block lasts."""
    from rich.console import Console  # not for --help

    def say(sentence: str) -> None:
        click.echo(sentence, err=True)

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{doing} …") as status:
            yield Shown(lambda transfer: status.update(f"{doing} … {transfer}"), lambda text: console.print(text))
    else:
        say(f"{doing} …")
        yield Shown(TellSometimes(say), say)
