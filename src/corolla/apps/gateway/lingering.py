"""How a connection ends when its caller is not done sending: so that the answer still reaches it.

A refused request is often answered before its body has come. A socket closed on a caller that still sends is reset, and
the reset destroys what the caller has not read yet, or meets its next request: of 3,000 refused `TRACE`s with a body of
eight bytes, 48 saw a reset instead of their 405. So, as RFC 9112 §9.6 asks: the answer says that the connection will
close, our direction is ended after it, and what still comes is dropped unread, within bounds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import h11

MAX_PIECES: Final = 1 << 16
"""Chunks, or reads, that one body may come in. Each costs 12 µs here; 4 MB in chunks of one byte cost a minute."""


@dataclass(frozen=True, slots=True)
class Linger:
    """How long a caller that has its answer may go on sending: whichever comes first. Then it is reset."""

    silent_s: float = 5.0
    total_s: float = 60.0
    """10 MB/s need 5 s for 50 MB."""
    max_bytes: int = 1 << 30
    """Most clients send a body to its end before they read; dropping a gigabyte costs under a second."""


class FrankConnection(h11.Connection):
    """Says `Connection: close` when it answers before the request has ended; and counts the pieces of a body."""

    _num_pieces = 0

    @property
    def is_midway(self) -> bool:
        """Whether more of a request must be expected: of its body, or of what is no HTTP."""
        return self.their_state in (h11.SEND_BODY, h11.ERROR)

    def send(self, event: h11.Event) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride] - theirs is overloaded
        if isinstance(event, h11.Response) and self.is_midway:
            event = h11.Response(
                status_code=event.status_code, headers=[*event.headers, (b"connection", b"close")], reason=event.reason
            )
        return super().send(event)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            if self._num_pieces > MAX_PIECES:
                raise h11.RemoteProtocolError(f"a body in more than {MAX_PIECES} pieces")
        return event


class LingeringTransport:
    """A transport whose `close` hears the caller out if `is_midway` says that it is not done; else as ever.

    Everything that is not about closing is the inner transport's.
    """

    def __init__(self, inner: asyncio.Transport, is_midway: Callable[[], bool], bounds: Linger) -> None:
        self._inner = inner
        self._is_midway = is_midway
        self._bounds = bounds
        self._bytes_left = bounds.max_bytes
        self._total: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def is_lingering(self) -> bool:
        return self._total is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_midway():
            self._inner.close()
            return
        loop = asyncio.get_running_loop()
        self._total = loop.call_later(self._bounds.total_s, self._inner.abort)
        self._silence = loop.call_later(self._bounds.silent_s, self._inner.abort)
        self._inner.write_eof()
        self._inner.resume_reading()

    def drop(self, num_bytes: int) -> None:
        """So much has come while lingering."""
        assert self._silence is not None
        self._silence.cancel()
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            self._inner.abort()
        else:
            self._silence = asyncio.get_running_loop().call_later(self._bounds.silent_s, self._inner.abort)

    def end(self) -> None:
        """Linger no more: the caller has ended its side too, or the server stops."""
        self._inner.close()

    def lost(self) -> None:
        """The connection is gone."""
        for timer in (self._total, self._silence):
            if timer is not None:
                timer.cancel()
