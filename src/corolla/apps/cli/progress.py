"""Says on standard error that something takes a while: a spinner on a terminal, a plain line elsewhere."""

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import click

from corolla.models.transfer import Progress, TellSometimes

SHOW_AFTER_S = 2.0
"""Shorter waits for an answer's first word need no explanation."""

Write = Callable[[str], None]


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


@contextmanager
def progress_until_text(doing: str, write: Write, *, after_s: float = SHOW_AFTER_S) -> Generator[Write]:
    """A `write` for what comes in the block. Until its first text, `doing` is shown when that takes long.

    From a thread of its own, since the one that waits is in a step. Gone before anything is written.
    """
    shown, lock, is_over = ExitStack(), threading.Lock(), False

    def show() -> None:
        with lock:
            if not is_over:
                shown.enter_context(progress(doing))

    def hide() -> None:
        nonlocal is_over
        with lock:
            is_over = True
            shown.close()

    def write_on(text: str) -> None:
        if text and not is_over:
            hide()
        write(text)

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield write_on
    finally:
        timer.cancel()
        hide()
