"""Messages ↔ the bytes of a stream. Sans-I/O: bytes in, messages out.

A message is one START frame and, when its body does not fit, MORE frames right behind it (all little-endian):

    START   u32 length · u8 version · u8 kind=1 · u16 header_len · u32 body_len · header · first part of the body
    MORE    u32 length · u8 version · u8 kind=2 · next part of the body

`length` counts what follows it; the first six bytes mean the same in every version. libp2p streams have no half-close
(writing EOF closes both ways), so frames carry their own ends. Who dialed a stream is a stranger until admitted:
the first message must lie in one small frame.

Reader:  head (6 → 12 → 12 + header_len bytes) → part of the body → head → …; dead after the first error.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from corolla.errors import LocalProtocolError, RemoteProtocolError, Unsupported
from corolla.wire.codec import MessageDecoder, encode
from corolla.wire.messages import AnyMessage
from corolla.wire.tensors import Buffer

PROTOCOL_VERSION: Final = 1
_START: Final = 1
_MORE: Final = 2

_LENGTH = struct.Struct("<I")
_PREFIX = struct.Struct("<IBB")
_START_HEAD = struct.Struct("<IBBHI")


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes of each thing. Both sides of a stream must agree, so only tests have others."""

    message_bytes: int = 64 << 20
    """Header and body of one message."""
    header_bytes: int = 16 << 10
    frame_bytes: int = 256 << 10
    """A whole frame on the wire: small enough that a heartbeat's stream never waits long behind one."""
    first_frame_bytes: int = 64 << 10
    """The one frame in which a stranger's first message must lie."""

    def __post_init__(self) -> None:
        if not 0 < self.header_bytes < 1 << 16:
            raise ValueError(f"header_bytes={self.header_bytes} must be within 1..65535")
        if not _START_HEAD.size + self.header_bytes <= self.first_frame_bytes <= self.frame_bytes:
            raise ValueError(
                f"first_frame_bytes={self.first_frame_bytes} must hold a header of {self.header_bytes} bytes "
                f"and be at most frame_bytes={self.frame_bytes}"
            )
        if not self.header_bytes <= self.message_bytes < 1 << 32:
            raise ValueError(f"message_bytes={self.message_bytes} must be at least header_bytes and below 2^32")


DEFAULT_LIMITS: Final = Limits()


def frame_message(message: AnyMessage, limits: Limits = DEFAULT_LIMITS, *, is_stranger: bool = False) -> list[Buffer]:
    """The bytes to write for a message, its tensors uncopied. Safe from any thread.

    `is_stranger`: it is the first that we say on a stream that we dialed. Raises LocalProtocolError when the peer
    would not take it.
    """
    header, parts = encode(message)
    body_len = sum(map(len, parts))
    name = type(message).__name__
    if len(header) > limits.header_bytes:
        raise LocalProtocolError(f"{name} has a header of {len(header)} bytes, at most {limits.header_bytes} travel")
    if len(header) + body_len > limits.message_bytes:
        raise LocalProtocolError(
            f"{name} has {len(header) + body_len} bytes, at most {limits.message_bytes} travel in one message"
        )
    whole = _START_HEAD.size + len(header) + body_len
    if is_stranger and whole > limits.first_frame_bytes:
        raise LocalProtocolError(
            f"{name} has {whole} bytes, the first message on a stream at most {limits.first_frame_bytes}"
        )
    if whole <= limits.frame_bytes:
        return [_start_head(whole, header, body_len) + header, *parts]
    return _fragment(header, parts, body_len, limits.frame_bytes)


class MessageReader:
    """Turns the bytes of one stream into messages, however they are cut.

    Holds at most one message: memory grows with the bytes that came, never with the lengths they claim. The body is
    copied once, out of the chunks and into memory of its own that its tensors then share: a chunk may be reused, and a
    small message does not keep a large chunk alive.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, is_stranger: bool = True) -> None:
        """`is_stranger`: the peer dialed us, so that its first message must be small."""
        self._limits = limits
        self._max_frame = limits.first_frame_bytes if is_stranger else limits.frame_bytes
        self._must_be_whole = is_stranger
        self._decoder = MessageDecoder()
        self._failure: RemoteProtocolError | Unsupported | None = None
        self._head = bytearray()
        self._head_wanted = _PREFIX.size
        self._header = b""  # of the message under way; empty between messages
        self._body = bytearray()
        self._body_len = 0
        self._part_left = 0

    def feed(self, data: Buffer) -> Iterator[AnyMessage]:
        """Yields each message that `data` completes; must be exhausted before the next call.

        Raises RemoteProtocolError, or Unsupported for another protocol version, after the messages before the fault:
        how the stream was cut into chunks changes nothing. From then on the reader is dead and raises the same.
        """
        if self._failure is not None:
            raise self._failure
        rest = memoryview(data)
        while rest:
            try:
                if self._is_whole(rest):
                    message, rest = self._take_whole(rest)
                else:
                    rest = self._take(rest)
                    message = self._completed()
            except (RemoteProtocolError, Unsupported) as error:
                self._failure = error
                self._drop_message()
                raise
            if message is not None:
                yield message

    @property
    def bytes_under_way(self) -> int:
        """Of the body of a message that is not complete yet."""
        return len(self._body)

    def finish(self) -> None:
        """The stream has ended. Raises RemoteProtocolError when it did so inside a message."""
        if self._failure is not None:
            raise self._failure
        if self._header or self._head:
            raise RemoteProtocolError(
                f"the stream ended inside a message: {len(self._body)} of {self._body_len} bytes of its body had come"
            )

    def _is_whole(self, rest: memoryview) -> bool:
        """Whether a message starts here and lies in one frame, all of it here: as nearly every step of a token does."""
        if self._header or self._head or len(rest) < _START_HEAD.size:
            return False
        length, version, kind, header_len, body_len = _START_HEAD.unpack_from(rest)
        return (
            version == PROTOCOL_VERSION
            and kind == _START
            and 0 < header_len <= self._limits.header_bytes
            and _LENGTH.size + length == _START_HEAD.size + header_len + body_len
            and _LENGTH.size + length <= min(len(rest), self._max_frame)
            and header_len + body_len <= self._limits.message_bytes
        )

    def _take_whole(self, rest: memoryview) -> tuple[AnyMessage, memoryview]:
        length, _, _, header_len, _ = _START_HEAD.unpack_from(rest)
        self._max_frame, self._must_be_whole = self._limits.frame_bytes, False
        end, body_start = _LENGTH.size + length, _START_HEAD.size + header_len
        message = self._decoder.decode(rest[_START_HEAD.size : body_start], bytes(rest[body_start:end]))
        return message, rest[end:]

    def _take(self, rest: memoryview) -> memoryview:
        """Moves the next piece of `rest` to where it belongs; what remains of it."""
        if self._part_left:
            part = rest[: self._part_left]
            self._body += part
            self._part_left -= len(part)
            return rest[len(part) :]
        part = rest[: self._head_wanted - len(self._head)]
        self._head += part
        if len(self._head) == self._head_wanted:
            self._enter_head()
        return rest[len(part) :]

    def _completed(self) -> AnyMessage | None:
        if self._part_left or not self._header or len(self._body) != self._body_len:
            return None
        header, body = self._header, self._body
        self._drop_message()
        self._max_frame, self._must_be_whole = self._limits.frame_bytes, False
        return self._decoder.decode(header, body)

    def _enter_head(self) -> None:
        """As much of the frame's head is here as was wanted: check it, then want more or begin its body."""
        if len(self._head) == _PREFIX.size:
            self._check_prefix()
        elif len(self._head) == _START_HEAD.size:
            self._check_start()
        else:
            length = _LENGTH.unpack_from(self._head)[0]
            self._header = bytes(memoryview(self._head)[_START_HEAD.size :])
            self._part_left = _LENGTH.size + length - len(self._head)
            self._expect_head()

    def _check_prefix(self) -> None:
        length, version, kind = _PREFIX.unpack(self._head)
        if version != PROTOCOL_VERSION:
            raise Unsupported(
                f"the peer speaks protocol version {version}, this side version {PROTOCOL_VERSION}",
                value=str(version),
                bound=str(PROTOCOL_VERSION),
            )
        if _LENGTH.size + length > self._max_frame:
            raise RemoteProtocolError(
                f"a frame of {_LENGTH.size + length} bytes, at most {self._max_frame} are allowed"
            )
        if kind == _START and not self._header:
            self._head_wanted = _START_HEAD.size
        elif kind == _MORE and self._header:
            self._begin_more(_LENGTH.size + length - _PREFIX.size)
        else:
            raise RemoteProtocolError(f"a frame of kind {kind} {'inside' if self._header else 'outside'} a message")

    def _check_start(self) -> None:
        length, _, _, header_len, body_len = _START_HEAD.unpack(self._head)
        limits, part_len = self._limits, _LENGTH.size + length - _START_HEAD.size - header_len
        if not 0 < header_len <= limits.header_bytes:
            raise RemoteProtocolError(f"a header of {header_len} bytes, 1 to {limits.header_bytes} are allowed")
        if header_len + body_len > limits.message_bytes:
            raise RemoteProtocolError(
                f"a message of {header_len + body_len} bytes, at most {limits.message_bytes} are allowed"
            )
        if not 0 <= part_len <= body_len:
            raise RemoteProtocolError(
                f"a frame of {_LENGTH.size + length} bytes cannot start a message of {header_len} + {body_len}"
            )
        if self._must_be_whole and part_len < body_len:
            raise RemoteProtocolError(f"a first message of {header_len} + {body_len} bytes does not lie in one frame")
        self._body_len = body_len
        self._head_wanted = _START_HEAD.size + header_len

    def _begin_more(self, part_len: int) -> None:
        missing = self._body_len - len(self._body)
        if not 0 < part_len <= missing:  # empty ones would keep a stream busy for ever without bringing anything
            raise RemoteProtocolError(f"a frame brings {part_len} bytes of a body of which {missing} are missing")
        self._part_left = part_len
        self._expect_head()

    def _expect_head(self) -> None:
        self._head = bytearray()
        self._head_wanted = _PREFIX.size

    def _drop_message(self) -> None:
        self._header, self._body, self._body_len, self._part_left = b"", bytearray(), 0, 0
        self._expect_head()


def _start_head(frame_bytes: int, header: bytes, body_len: int) -> bytes:
    return _START_HEAD.pack(frame_bytes - _LENGTH.size, PROTOCOL_VERSION, _START, len(header), body_len)


def _fragment(header: bytes, parts: list[memoryview], body_len: int, frame_bytes: int) -> list[Buffer]:
    """A START frame and MORE frames, each as full as it may be, their bodies slices of `parts`."""
    buffers: list[Buffer] = [_start_head(frame_bytes, header, body_len) + header]
    body_left = body_len
    room = frame_bytes - _START_HEAD.size - len(header)
    for part in parts:
        while part:
            if not room:
                room = min(body_left, frame_bytes - _PREFIX.size)
                buffers.append(_PREFIX.pack(room + _PREFIX.size - _LENGTH.size, PROTOCOL_VERSION, _MORE))
            piece = part[:room]
            buffers.append(piece)
            part = part[len(piece) :]
            room -= len(piece)
            body_left -= len(piece)
    return buffers
