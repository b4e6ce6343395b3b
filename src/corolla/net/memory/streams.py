"""Byte streams in memory: two pipes, one each way, over the links of `links.py`.

A written byte waits in the outbox (`pending_bytes`) until the pipe's window has room, then is under way, then
has arrived, then is read. A reader that pauses, a cut or a frozen peer leave the window full, so back-pressure
shows at the writer. An end travels in order behind the bytes under way: what left before a close or a crash arrives.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corolla.errors import LocalProtocolError
from corolla.ids import PeerId
from corolla.net.memory.links import MAX_PIECE_BYTES, Link, Links
from corolla.net.streams import OnBytes, OnClosed
from corolla.wire.tensors import Buffer

WINDOW_BYTES = 256 * 1024
"""Most bytes of one direction that are under way or arrived and unread, like a socket's buffers."""


@dataclass(frozen=True, slots=True)
class _End:
    reason: str


class Pipe:
    """One direction of a stream."""

    def __init__(self, links: Links, source: PeerId, target: PeerId) -> None:
        self._links = links
        self._link: Link = (source, target)
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[memoryview] = deque()
        self._end: _End | None = None
        self._end_left = False
        self._awaits_thaw = False
        self._under_way: deque[tuple[float, memoryview | _End]] = deque()
        self._arrived: deque[memoryview | _End] = deque()
        self._unread_bytes = 0
        self._reader: OnBytes | None = None
        self._on_end: OnClosed | None = None
        self._is_paused = False
        self._is_discarding = False
        self.pending_bytes = 0

    # The writer's side.

    def write(self, parts: Sequence[Buffer]) -> None:
        if self._end is not None:
            return
        for part in _gathered(parts):
            self._outbox.append(part)
            self.pending_bytes += len(part)
        self._send()

    def end(self, reason: str) -> None:
        """Drop what has not left, and let the reader know behind what has."""
        if self._end is None:
            self._outbox.clear()
            self.pending_bytes = 0
            self._end = _End(reason)
            self._send()

    def _send(self) -> None:
        """Let leave what may leave now."""
        source = self._link[0]
        if not self._links.can_send(source):
            if not self._awaits_thaw:
                self._awaits_thaw = True
                self._links.when_open((source, source), self._send_after_thaw)
            return
        while self._outbox and self._unread_bytes < WINDOW_BYTES:
            piece = self._take_piece()
            self._unread_bytes += len(piece)
            self._depart(piece, len(piece))
        if self._end is not None and not self._end_left:
            self._end_left = True
            self._depart(self._end, 0)

    def _send_after_thaw(self) -> None:
        self._awaits_thaw = False
        self._send()

    def _take_piece(self) -> memoryview:
        head = self._outbox.popleft()
        num_bytes = self._links.piece_bytes(min(len(head), WINDOW_BYTES - self._unread_bytes))
        if num_bytes < len(head):
            self._outbox.appendleft(head[num_bytes:])
        self.pending_bytes -= num_bytes
        return head[:num_bytes]

    def _depart(self, item: memoryview | _End, num_bytes: int) -> None:
        arrives_at = self._loop.time() + self._links.travel_s(self._link, num_bytes)
        self._under_way.append((arrives_at, item))  # a queue: one that would arrive sooner waits behind the others
        if len(self._under_way) == 1:
            self._loop.call_at(arrives_at, self._arrive)

    # The way.

    def _arrive(self) -> None:
        if not self._links.is_open(self._link):
            self._links.when_open(self._link, self._arrive_late)
            return
        now = self._loop.time()
        while self._under_way and self._under_way[0][0] <= now:
            self._arrived.append(self._under_way.popleft()[1])
        if self._under_way:
            self._loop.call_at(self._under_way[0][0], self._arrive)
        self.deliver()

    def _arrive_late(self) -> None:
        """The link opened again: what waited in front of it is sent once more."""
        again_s = self._links.travel_s(self._link, 0)
        self._loop.call_later(again_s, self._arrive)

    # The reader's side.

    def attach(self, on_bytes: OnBytes, on_end: OnClosed) -> None:
        self._reader = on_bytes
        self._on_end = on_end
        self._loop.call_soon(self.deliver)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self.deliver)

    def discard(self) -> None:
        """Nobody reads any more: what arrives is dropped."""
        self._is_discarding = True
        self._arrived.clear()

    def deliver(self) -> None:
        """Hand over what has arrived, as long as the reader wants it."""
        while self._arrived and not self._is_paused and not self._is_discarding:
            if self._reader is None or self._on_end is None:
                return
            item = self._arrived.popleft()
            if isinstance(item, _End):
                self._on_end(item.reason)
                return
            piece = self._joined_with_next(item)
            self._give_back_window(len(piece))
            self._reader(piece)
        if self._is_discarding:
            self._arrived.clear()

    def _joined_with_next(self, first: memoryview) -> memoryview:
        """`first`, often with small pieces that arrived behind it: a byte stream keeps no borders."""
        pieces, total = [first], len(first)
        while self._arrived and not isinstance(following := self._arrived[0], _End):
            total += len(following)
            if total > MAX_PIECE_BYTES or not self._links.joins_pieces():
                break
            pieces.append(following)
            self._arrived.popleft()
        return first if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _give_back_window(self, num_bytes: int) -> None:
        """The writer may send more, at once: the acknowledgement's travel is left out, but not a cut in its way."""
        back: Link = (self._link[1], self._link[0])
        if self._links.is_open(back):
            self._widen(num_bytes)
        else:
            self._links.when_open(back, lambda: self._widen(num_bytes))

    def _widen(self, num_bytes: int) -> None:
        self._unread_bytes -= num_bytes
        if self._outbox:
            self._send()


class MemoryStream:
    """One end of a stream, as `net/streams.py` asks for it."""

    def __init__(
        self,
        peer: PeerId,
        outgoing: Pipe,
        incoming: Pipe,
        forget: Callable[["MemoryStream"], None],
        on_nonsense: Callable[[PeerId], None],
    ) -> None:
        self._peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._forget = forget
        self._on_nonsense = on_nonsense
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_closed: OnClosed | None = None
        self._closed_reason: str | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def pending_bytes(self) -> int:
        """Bytes handed over by another thread count once the loop has seen them."""
        return self._outgoing.pending_bytes

    def start(self, on_bytes: OnBytes, on_closed: OnClosed) -> None:
        if self._on_closed is not None:
            raise LocalProtocolError("a stream was started twice")
        self._on_closed = on_closed
        if self._closed_reason is not None:
            self._loop.call_soon(on_closed, self._closed_reason)
            return
        self._incoming.attach(on_bytes, self._end)

    def write(self, parts: Sequence[Buffer]) -> None:
        if self._closed_reason is not None:
            return
        if threading.get_ident() == self._thread:
            self._outgoing.write(parts)
        else:
            self._loop.call_soon_threadsafe(self._outgoing.write, parts)

    def pause_reading(self) -> None:
        self._incoming.pause()

    def resume_reading(self) -> None:
        self._incoming.resume()

    def report_nonsense(self) -> None:
        self._on_nonsense(self._peer)

    def close(self) -> None:
        self.fail("closed here", told_to_peer="closed by the other side")

    def fail(self, reason: str, *, told_to_peer: str) -> None:
        """End both directions; each side hears its own reason."""
        if self._closed_reason is not None:
            return
        self._incoming.discard()
        self._outgoing.end(told_to_peer)
        self._mark_closed(reason)
        if self._on_closed is not None:
            self._loop.call_soon(self._on_closed, reason)

    def _end(self, reason: str) -> None:
        """The other side ended, and all it had sent was read."""
        if self._closed_reason is not None:
            return
        assert self._on_closed is not None, "a pipe delivers only to a started stream"
        self._outgoing.end("closed by the other side")
        self._mark_closed(reason)
        self._on_closed(reason)

    def _mark_closed(self, reason: str) -> None:
        self._closed_reason = reason
        self._forget(self)


def _gathered(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts as flat bytes; small ones as one piece, the way a gathering write leaves a machine."""
    views = [memoryview(part).cast("B") for part in parts]
    if len(views) > 1 and sum(len(view) for view in views) <= MAX_PIECE_BYTES:
        return [memoryview(b"".join(views))]
    return [view for view in views if len(view)]
