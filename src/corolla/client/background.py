"""One event loop in a thread, for the blocking API: the user's thread asks, the loop does the network.

All models of a process share it. It is made on first use and never after a fork (a thread does not survive one).
"""

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from corolla.errors import LocalProtocolError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
LOOK_S = 1.0
"""A signal that comes just as a thread begins to wait does not wake it: Python looks for one when the wait is over."""


class BackgroundLoop:
    """Runs coroutines for other threads until the process ends."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._at_exit: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="corolla-network", daemon=True)
        self._thread.start()
        atexit.register(self._shut_down)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or its error, in the calling thread. The coroutine bounds its own waits."""
        future = self.start(work)
        try:
            return self._result(future)
        except BaseException:
            if future.cancel():  # Ctrl-C in the user's thread ends the work too
                self._let_cancelled_end()
            raise

    def _result(self, future: "Future[T]") -> T:
        while True:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.done():  # its own, or it ended at this very moment
                    return future.result()

    def _let_cancelled_end(self) -> None:
        """Return when it moves nothing any more, so that what it worked on may be put in order."""
        with contextlib.suppress(TimeoutError):
            self.start(asyncio.sleep(0)).result(timeout=CLOSE_TIMEOUT_S)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin `work` and go on; ask the future for the result."""
        if os.getpid() != self._pid:
            work.close()
            raise LocalProtocolError("this process was forked after corolla was used; load the model in the child")
        if threading.current_thread() is self._thread:
            work.close()
            raise LocalProtocolError("the blocking API was called on corolla's own event loop")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], None]) -> None:
        """Run a plain function on the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(work)

    def at_exit(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `work()` before the process ends."""
        self._at_exit.append(work)

    def not_at_exit(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if work in self._at_exit:
            self._at_exit.remove(work)

    def _shut_down(self) -> None:
        if os.getpid() != self._pid:
            return
        for work in self._at_exit:
            future = self.start(work())
            try:
                future.result(timeout=CLOSE_TIMEOUT_S)
            except TimeoutError:
                future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)


_shared: BackgroundLoop | None = None
_guard = threading.Lock()


def background_loop() -> BackgroundLoop:
    """The process's one background loop."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = BackgroundLoop()
        return _shared
