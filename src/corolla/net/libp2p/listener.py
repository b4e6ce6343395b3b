"""Incoming streams: the daemon connects to one unix socket of ours and first says whose stream it is.

No task and no timer of its own for each: this is what a flood of streams costs at least.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from corolla.clock import loop_time
from corolla.errors import RemoteProtocolError
from corolla.net.libp2p.control import RawStream, split_introduction

log = logging.getLogger(__name__)

INTRODUCTION_TIMEOUT_S: Final = 5.0
MAX_UNINTRODUCED: Final = 256
PAUSE_S: Final = 1.0
_INTRODUCTION_BYTES: Final = 512
"""One has a hundred; what is beyond it stays in the system's hands until somebody wants it."""


class Listener:
    """Hands every introduced stream to `on_stream`, on the loop. `async with` starts and ends it."""

    def __init__(self, path: Path, on_stream: Callable[[RawStream], None]) -> None:
        self.path = path
        self._on_stream = on_stream
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unintroduced: dict[socket.socket, tuple[bytes, float]] = {}
        """What each has said so far, and until when it may say the rest; the oldest first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._resuming: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._sock.bind(str(self.path))
        self._sock.listen(MAX_UNINTRODUCED)
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in (self._resuming, self._sweeping):
            if timer is not None:
                timer.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        for sock in list(self._unintroduced):
            self._drop(sock, "closed by us")

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return  # it left again
        except OSError as fault:
            self._pause(fault)
            return
        if len(self._unintroduced) >= MAX_UNINTRODUCED:
            sock.close()
            return
        sock.setblocking(False)
        self._unintroduced[sock] = b"", loop_time() + INTRODUCTION_TIMEOUT_S
        asyncio.get_running_loop().add_reader(sock, self._read, sock)
        if self._sweeping is None:
            self._sweep()

    def _pause(self, fault: OSError) -> None:
        """Out of descriptors, most likely: trying again at once would only keep the loop busy."""
        log.warning("cannot accept streams for a while", extra={"fault": fault.strerror, "pause_s": PAUSE_S})
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        self._resuming = loop.call_later(PAUSE_S, loop.add_reader, self._sock, self._accept)

    def _read(self, sock: socket.socket) -> None:
        try:
            more = sock.recv(_INTRODUCTION_BYTES)
        except BlockingIOError:
            return
        except OSError as fault:
            self._drop(sock, fault.strerror or str(fault))
            return
        heard, until = self._unintroduced[sock]
        try:
            raw = split_introduction(sock, heard + more) if more else None
        except (RemoteProtocolError, ValueError) as fault:
            self._drop(sock, str(fault))
            return
        if raw is not None:
            self._forget(sock)
            self._on_stream(raw)
        elif not more or len(heard) + len(more) > _INTRODUCTION_BYTES:
            self._drop(sock, "it ended" if not more else "it is too long")
        else:
            self._unintroduced[sock] = heard + more, until

    def _sweep(self) -> None:
        """Drop those whose time is up; again while there are others."""
        now = loop_time()
        while self._unintroduced and (oldest := next(iter(self._unintroduced.items())))[1][1] <= now:
            self._drop(oldest[0], "not in time")
        self._sweeping = None
        if self._unintroduced:
            until = next(iter(self._unintroduced.values()))[1]
            self._sweeping = asyncio.get_running_loop().call_at(until, self._sweep)

    def _forget(self, sock: socket.socket) -> None:
        del self._unintroduced[sock]
        asyncio.get_running_loop().remove_reader(sock)

    def _drop(self, sock: socket.socket, reason: str) -> None:
        log.debug("a stream came without introduction", extra={"reason": reason})
        self._forget(sock)
        sock.close()
