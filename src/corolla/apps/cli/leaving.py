"""How a serving process ends: on the first SIGINT or SIGTERM well, on the second at once, and with its parent."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import click

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ORPHAN_GRACE_S = 15.0
"""How long an orphan may take to leave well before it is ended."""


@contextmanager
def stop_on_signals() -> Generator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, saying so; the second then has its default effect: death.

    Use inside a running loop. On exit the signals are as they were.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    before = {kind: signal.getsignal(kind) for kind in STOP_SIGNALS}

    def leave(received: signal.Signals) -> None:
        click.echo(f"leaving ({received.name}); a second signal ends at once", err=True)
        _let_signals_kill(loop)
        stop.set()

    for kind in STOP_SIGNALS:
        loop.add_signal_handler(kind, leave, kind)
    try:
        yield stop
    finally:
        for kind in STOP_SIGNALS:
            loop.remove_signal_handler(kind)
            signal.signal(kind, before[kind])


def _let_signals_kill(loop: asyncio.AbstractEventLoop) -> None:
    for kind in STOP_SIGNALS:
        loop.remove_signal_handler(kind)
        signal.signal(kind, signal.SIG_DFL)


def exit_with_parent() -> None:
    """Leave when standard input ends, as it does when a parent that holds the other end dies, however it dies.

    A pipe works on every system and also when the parent is killed; a thread works while the main one imports.
    """
    threading.Thread(target=_leave_at_end_of_input, name="parent-watch", daemon=True).start()


def _leave_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)
