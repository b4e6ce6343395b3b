"""A byte stream over the daemon's unix socket, without StreamReader and without a task per stream.

Reading happens in the event loop, straight from the socket to `on_bytes` (0.1 ms a hop less than a StreamReader,
measured). Writing happens where `write` is called, in the device thread too: when nothing waits, the bytes go to
the socket at once (another 0.1 ms less); what does not fit is kept here and sent by the loop, and while anything
is kept every further write joins the queue, so nothing overtakes. One lock guards queue, socket and end.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from corolla.ids import PeerId
from corolla.net.libp2p.control import RawStream
from corolla.net.libp2p.process import OwnProcess
from corolla.net.streams import OnBytes, OnClosed
from corolla.wire.tensors import Buffer

log = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 18
_FIRST_READ_BYTES: Final = 1 << 12
"""Of a stream that came in: noise shows at once, and the rest is never read. A full read doubles the next."""
_MAX_PARTS: Final = 512
"""Parts handed to the system in one call; POSIX allows 1024."""
_read_buffer = threading.local()


class SocketStream:
    """`ByteStream` over a connected socket. `on_end` is told when it is over."""

    def __init__(
        self,
        raw: RawStream,
        on_end: Callable[["SocketStream"], None],
        *,
        on_nonsense: Callable[["SocketStream"], None] = lambda _stream: None,
        is_incoming: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = OwnProcess()
        self._peer = raw.peer
        self.address: Final = raw.address
        """The other end's numeric IP address, when the daemon tells."""
        self._sock = raw.sock
        self._sock.setblocking(False)
        self._early: bytes = raw.early
        self._on_end = on_end
        self._on_nonsense = on_nonsense
        self._read_bytes = _FIRST_READ_BYTES if is_incoming else _READ_BYTES
        self._on_bytes: OnBytes | None = None
        self._on_closed: OnClosed | None = None
        self._is_paused = False
        self._is_reading = False
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_broken = False
        """Nothing can be written any more; the end follows."""
        self._is_closed = False

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def pending_bytes(self) -> int:
        return self._unsent_bytes

    def start(self, on_bytes: OnBytes, on_closed: OnClosed) -> None:
        assert self._on_bytes is None, "a stream is started once"
        self._on_bytes, self._on_closed = on_bytes, on_closed
        if self._is_closed:
            self._loop.call_soon(on_closed, "closed before it was started")
        else:
            self._loop.call_soon(self._read_or_not)

    def write(self, parts: Sequence[Buffer]) -> None:
        self._process.check()
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        with self._lock:
            if self._is_closed or self._is_broken or not views:
                return
            if self._unsent:
                self._keep(views)
                return
            try:
                num_sent = self._send(views)
            except OSError as fault:
                self._give_up_writing(fault)
                return
            if num_sent < sum(map(len, views)):
                self._keep(_after(views, num_sent))
                self._from_any_thread(self._start_flushing)

    def pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._read_or_not()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._read_or_not()

    def report_nonsense(self) -> None:
        self._on_nonsense(self)

    def close(self) -> None:
        self.end("closed by us")

    def end(self, reason: str) -> None:
        """Close, from any thread; `on_closed` gets the reason. Later calls do nothing."""
        with self._lock:
            self._end_soon(reason)

    # Below: `_lock` is held in _keep, _send, _give_up_writing and _end_soon; the others run on the loop.

    def _keep(self, views: Sequence[memoryview]) -> None:
        self._unsent.extend(views)
        self._unsent_bytes += sum(map(len, views))

    def _send(self, views: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(views[:_MAX_PARTS])
        except (BlockingIOError, InterruptedError):
            return 0

    def _give_up_writing(self, fault: OSError) -> None:
        """The peer's end is gone, but its last words (why it refused us, say) may still lie here to be read."""
        self._is_broken = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._from_any_thread(self._read_last_words, _reason(fault))

    def _end_soon(self, reason: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._from_any_thread(self._finish, reason)

    def _from_any_thread(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            self._sock.close()

    def _finish(self, reason: str) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._is_reading = False
        with self._lock:  # no thread is inside sendmsg when the descriptor, and with it its number, is given back
            self._sock.close()
        self._on_end(self)
        if self._on_closed is not None:
            self._on_closed(reason)

    def _start_flushing(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._sock, self._flush)

    def _flush(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            try:
                num_sent = self._send(list(islice(self._unsent, _MAX_PARTS))) if self._unsent else 0
            except OSError as fault:
                self._give_up_writing(fault)
                num_sent = 0
            self._unsent_bytes -= num_sent
            _drop_front(self._unsent, num_sent)
            if not self._unsent:
                self._loop.remove_writer(self._sock)

    def _read_or_not(self) -> None:
        """Listen to the socket exactly while somebody wants its bytes."""
        wanted = self._on_bytes is not None and not self._is_paused and not self._is_closed
        if wanted and self._early:
            early, self._early = self._early, b""
            self._deliver(early)
            self._loop.call_soon(self._read_or_not)  # the receiver may have paused or closed
        elif wanted != self._is_reading and not self._is_closed:
            self._is_reading = wanted
            if wanted:
                self._loop.add_reader(self._sock, self._on_readable)
            else:
                self._loop.remove_reader(self._sock)

    def _on_readable(self) -> None:
        try:
            data = self._receive()
        except BlockingIOError:
            return
        except OSError as fault:
            self.end(_reason(fault))
            return
        if data:
            self._deliver(data)
        else:
            self.end("closed by the peer")

    def _read_last_words(self, reason: str) -> None:
        """What a socket holds is bounded by the system, so this ends."""
        with contextlib.suppress(OSError):
            while self._is_reading and not self._is_closed and (data := self._receive()):
                self._deliver(data)
        self.end(reason)

    def _receive(self) -> bytes:
        buffer = _shared_read_buffer()[: self._read_bytes]
        num_read = self._sock.recv_into(buffer)
        if num_read == self._read_bytes:
            self._read_bytes = min(2 * num_read, _READ_BYTES)
        return bytes(buffer[:num_read])

    def _deliver(self, data: bytes) -> None:
        if self._is_closed:
            return
        assert self._on_bytes is not None
        try:
            self._on_bytes(data)
        except Exception:  # a receiver's bug ends its own stream, not the loop's other work
            log.exception("receiver failed", extra={"peer": self._peer})
            self.end("its receiver failed")


def _shared_read_buffer() -> memoryview:
    """One buffer a thread: what is read is copied out at once, in its true size."""
    try:
        return _read_buffer.view
    except AttributeError:
        _read_buffer.view = memoryview(bytearray(_READ_BYTES))
        return _read_buffer.view


def _after(views: list[memoryview], num_sent: int) -> list[memoryview]:
    """What remains of `views` when its first bytes are gone."""
    for at, view in enumerate(views):
        if num_sent < len(view):
            return [view[num_sent:], *views[at + 1 :]]
        num_sent -= len(view)
    return []


def _drop_front(unsent: deque[memoryview], num_sent: int) -> None:
    while num_sent:
        first = unsent.popleft()
        if num_sent < len(first):
            unsent.appendleft(first[num_sent:])
            return
        num_sent -= len(first)


def _reason(fault: OSError) -> str:
    return f"the connection broke: {fault.strerror or fault}"
