"""Incoming streams: the daemon connects to one unix socket of ours and first says whose stream it is."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from corolla.errors import SwarmError
from corolla.net.libp2p.control import RawStream, read_introduction

log = logging.getLogger(__name__)

INTRODUCTION_TIMEOUT_S: Final = 5.0
MAX_UNINTRODUCED: Final = 256
PAUSE_S: Final = 1.0


class Listener:
    """Hands every introduced stream to `on_stream`, on the loop. `async with` starts and ends it."""

    def __init__(self, path: Path, on_stream: Callable[[RawStream], None]) -> None:
        self.path = path
        self._on_stream = on_stream
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._introductions: set[asyncio.Task[None]] = set()
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
        if self._resuming is not None:
            self._resuming.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        for introduction in self._introductions:
            introduction.cancel()
        await asyncio.gather(*self._introductions, return_exceptions=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return  # it left again
        except OSError as fault:
            self._pause(fault)
            return
        if len(self._introductions) >= MAX_UNINTRODUCED:
            sock.close()
            return
        sock.setblocking(False)
        task = asyncio.ensure_future(self._introduce(sock))
        self._introductions.add(task)
        task.add_done_callback(self._introductions.discard)

    def _pause(self, fault: OSError) -> None:
        """Out of descriptors, most likely: trying again at once would only keep the loop busy."""
        log.warning("cannot accept streams for a while", extra={"fault": fault.strerror, "pause_s": PAUSE_S})
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        self._resuming = loop.call_later(PAUSE_S, loop.add_reader, self._sock, self._accept)

    async def _introduce(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(INTRODUCTION_TIMEOUT_S):
                raw = await read_introduction(sock)
        except (TimeoutError, OSError, SwarmError, ValueError) as fault:
            log.debug("a stream came without introduction", extra={"fault": str(fault)})
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            self._on_stream(raw)
