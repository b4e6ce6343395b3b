"""How a serving process ends: on the first SIGINT or SIGTERM well, on the second at once, and with its parent."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import click

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ORPHAN_GRACE_S = 15.0
"""How long an orphan may take to leave well before it is ended."""


Serve = Callable[[asyncio.Event, Callable[[], None]], Awaitable[None]]
"""Serves until the event is set; calls the function once it is ready."""


def run_until_stopped(serve: Serve) -> None:
    """Run `serve` on a new event loop until it ends: by itself, or because a signal told it to.

    A signal that comes before it is ready cancels it: a server that still joins or loads has nothing to end well.
    """
    import uvloop  # not for --help

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_stopped(serve))


async def _serve_until_stopped(serve: Serve) -> None:
    is_ready = False

    def ready() -> None:
        nonlocal is_ready
        is_ready = True

    with stop_on_signals() as stop:
        serving = asyncio.ensure_future(serve(stop, ready))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not is_ready and stop.is_set():
                serving.cancel()
            await serving
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        finally:
            stopped.cancel()
            serving.cancel()


@contextmanager
def stop_on_signals() -> Generator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, saying so; the second then has its default effect: death.

    Use inside a running loop. On exit the signals are as they were.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    before = {kind: signal.getsignal(kind) for kind in STOP_SIGNALS}

    def leave(received: signal.Signals) -> None:
        _let_signals_kill(loop)
        if stop.is_set():  # the second came before the first was seen
            signal.raise_signal(received)
        stop.set()
        with contextlib.suppress(OSError):  # whoever read our errors may be gone; that must not keep us here
            click.echo(f"leaving ({received.name}); a second signal ends at once", err=True)

    for kind in STOP_SIGNALS:
        loop.add_signal_handler(kind, leave, kind)
    try:
        yield stop
    finally:
        for kind in STOP_SIGNALS:
            loop.remove_signal_handler(kind)
            if before[kind] is not None:  # None: set by something that is not Python
                signal.signal(kind, before[kind])


def _let_signals_kill(loop: asyncio.AbstractEventLoop) -> None:
    for kind in STOP_SIGNALS:
        loop.remove_signal_handler(kind)
        signal.signal(kind, signal.SIG_DFL)


def leave_with_parent() -> None:
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
