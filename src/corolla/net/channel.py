"""Typed messages over one byte stream: what client, server and swarm talk through.

Everything but `send` belongs to the event loop; `send` may be called from any thread: a device thread that writes its
own results saves a hand-over, 0.1 ms a hop (measured). A channel ends once, with the first reason:

    reading broke the protocol           RemoteProtocolError or Unsupported: the peer is to blame
    the stream ended, or is never read   HopFailed(peer, reason)
    our own handler failed               LocalProtocolError
    our own `close`                      None

Heartbeats are `net/liveness.py`'s; what a message means is for those above.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from corolla.errors import HopFailed, LocalProtocolError, RemoteProtocolError, SwarmError, Unsupported
from corolla.ids import PeerId
from corolla.net.inflow import InflowMeter
from corolla.net.streams import ByteStream
from corolla.wire.frames import DEFAULT_LIMITS, Limits, MessageReader, frame_message
from corolla.wire.messages import AnyMessage
from corolla.wire.tensors import Buffer

MAX_PENDING_BYTES: Final = 64 << 20
"""One message of the largest size. Windows keep honest peers far below it."""

log = logging.getLogger(__name__)

OnMessage = Callable[[AnyMessage], None]
OnEnded = Callable[[SwarmError | None], None]


class Channel:
    """Messages to and from one peer.

    `on_message` and `on_closed` run on the loop, never inside the constructor; `on_closed` runs once, last. A message
    handler that raises RemoteProtocolError or Unsupported judges the peer: the channel ends with that error.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        we_dialed: bool,
        on_message: OnMessage,
        on_closed: OnEnded,
        on_inflow: Callable[[float], None] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        """`we_dialed`: which side is the stranger whose first message must be small. Needs a running loop.

        `on_inflow`: told now and then at how many bytes a second a large message has come.
        """
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._we_dialed = we_dialed
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_inflow = on_inflow
        self._inflow = InflowMeter()
        self._limits = limits
        self._max_pending_bytes = max_pending_bytes
        self._reader = MessageReader(limits, is_stranger=not we_dialed)
        self._has_sent = False
        self._is_open = True
        self._has_ended = False
        self._error: SwarmError | None = None
        self._last_heard = self._last_sent = self._loop.time()
        self._loop.call_soon(self._begin)

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def pending_bytes(self) -> int:
        """Bytes sent but not yet taken by the system."""
        return self._stream.pending_bytes

    @property
    def last_heard(self) -> float:
        """Loop time at which the last bytes came; the channel's birth before that."""
        return self._last_heard

    @property
    def last_sent(self) -> float:
        """Loop time of the last message sent; the channel's birth before that."""
        return self._last_sent

    def send(self, message: AnyMessage) -> None:
        """Send, from any thread, without waiting; a channel that has ended swallows it.

        Raises LocalProtocolError for a message that the peer would not take; the channel lives on. When more than
        `max_pending_bytes` already wait, the peer does not read: the message is dropped and the channel ends.
        """
        parts = frame_message(message, self._limits, is_stranger=self._we_dialed and not self._has_sent)
        if not self._is_open:
            return
        pending = self._stream.pending_bytes
        if pending > self._max_pending_bytes:
            self._is_open = False  # at once: nothing may follow on a dropped message
            reason = f"it does not read: {pending} bytes wait for it, at most {self._max_pending_bytes} may"
            self._loop.call_soon_threadsafe(self._end, HopFailed(self.peer, reason))
            return
        self._stream.write(parts)
        self._has_sent = True
        self._last_sent = self._loop.time()

    def pause(self) -> None:
        """Stop reading; messages of the bytes at hand may still come."""
        self._inflow.interrupt()
        self._stream.pause_reading()

    def resume(self) -> None:
        self._stream.resume_reading()

    def close(self) -> None:
        """End it; no message comes after this. What was not sent is lost. May be called twice."""
        self._end(None)

    def _begin(self) -> None:
        if self._has_ended:  # closed before it began: the stream, never started, will not say so
            self._stream.close()
            self._tell_closed()
        else:
            self._stream.start(self._on_bytes, self._on_stream_closed)

    def _on_bytes(self, data: Buffer) -> None:
        self._last_heard = self._loop.time()
        if not self._is_open:
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
                if not self._is_open:
                    return
            if self._on_inflow is not None:
                bytes_per_s = self._inflow.saw(self._reader.bytes_under_way, self._last_heard)
                if bytes_per_s is not None:
                    self._on_inflow(bytes_per_s)
        except (RemoteProtocolError, Unsupported) as error:
            if not self._we_dialed:
                self._stream.report_nonsense()
            self._end(error)
        except Exception:
            log.exception("message handler failed", extra={"peer": self.peer})
            self._end(LocalProtocolError(f"our handler of messages from {self.peer} failed"))

    def _end(self, error: SwarmError | None) -> None:
        if not self._has_ended:
            # Whoever keeps the error shall not keep the bytes that its traceback's frames hold.
            self._error = error.with_traceback(None) if error else None
            self._has_ended, self._is_open = True, False
            self._stream.close()

    def _on_stream_closed(self, reason: str) -> None:
        if not self._has_ended:
            self._has_ended, self._is_open, self._error = True, False, self._lost(reason)
        self._tell_closed()

    def _lost(self, reason: str) -> HopFailed:
        """A message cut off by the stream's end is a peer that died while writing, not one that lies."""
        try:
            self._reader.finish()
        except (RemoteProtocolError, Unsupported) as cut:
            error = HopFailed(self.peer, f"{reason} ({cut})")
            error.__cause__ = cut
            return error
        return HopFailed(self.peer, reason)

    def _tell_closed(self) -> None:
        try:
            self._on_closed(self._error)
        except Exception:
            log.exception("handler of a channel's end failed", extra={"peer": self.peer})
