"""Messages ↔ a header and the raw bytes of their tensors. Pure: no torch, no I/O.

The header is msgpack of the tagged message, in which a tensor is only `[dtype, shape]`. The tensors' bytes follow it
as the body, in the order in which the header mentions them, with nothing between or after them. So a new tensor
field needs a new major version (`wire/frames.py`); any other new field is ignored by those who do not know it.

What a peer sent wrong raises RemoteProtocolError, what we were about to send wrong LocalProtocolError.
"""

from typing import Any, get_args

import msgspec

from corolla.errors import LocalProtocolError, RemoteProtocolError
from corolla.wire.messages import AnyMessage
from corolla.wire.tensors import ITEM_BYTES, MAX_ELEMENTS, MAX_RANK, Buffer, DType, WireTensor

_MAX_QUOTED = 300
_NOTHING = memoryview(b"")


def encode(message: AnyMessage) -> tuple[bytes, list[memoryview]]:
    """The header, and the tensors' bytes uncopied. Safe from any thread. Raises LocalProtocolError.

    The header is read back as the peer will read it (2 µs): a value out of bounds shall fail here, as our own
    mistake, and not there, where it would end the stream and look like the peer's.
    """
    try:
        header = _ENCODER.encode(message)
        _CHECKER.decode(header)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    tensors = [getattr(message, field) for field in _TENSOR_FIELDS[type(message)]]
    return header, [_raw_bytes(tensor) for tensor in tensors if tensor is not None]


class MessageDecoder:
    """Decodes the messages of one stream; not to be shared between threads."""

    def __init__(self) -> None:
        self._body = _Body()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(
            AnyMessage, dec_hook=self._body.cut
        )

    def decode(self, header: Buffer, body: Buffer) -> AnyMessage:
        """The message, its tensors being views of `body`. Raises RemoteProtocolError."""
        self._body.rest = memoryview(body)
        try:
            message = self._decoder.decode(header)
            self._body.check_used_up()
            return message
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
            fault = _printable(str(error))
        finally:
            self._body.rest = _NOTHING
        # Raised out here, so that no error that somebody keeps keeps the body alive through its context.
        raise RemoteProtocolError(f"malformed message: {fault}")


class _Body:
    """The bytes of the message being decoded that no tensor has taken yet."""

    def __init__(self) -> None:
        self.rest = _NOTHING

    def cut(self, kind: type, description: object) -> WireTensor:
        """The tensor that the header describes, off the front of the rest."""
        dtype, shape, num_bytes = _checked(description)
        if num_bytes > len(self.rest):
            raise ValueError(f"{dtype} {list(shape)} takes {num_bytes} bytes, {len(self.rest)} of the body are left")
        tensor = WireTensor(dtype, shape, self.rest[:num_bytes])
        self.rest = self.rest[num_bytes:]
        return tensor

    def check_used_up(self) -> None:
        if self.rest:
            raise ValueError(f"the body has {len(self.rest)} bytes more than the tensors of its message take")


def _checked(description: object) -> tuple[DType, tuple[int, ...], int]:
    """dtype, shape and bytes of a tensor as a header describes it. Raises ValueError; takes no memory."""
    match description:
        case [dtype, [*sides]] if len(sides) <= MAX_RANK:
            pass
        case [_, _]:
            raise ValueError(f"a shape is a list of at most {MAX_RANK} sides")
        case _:
            raise ValueError("a tensor is [dtype, shape]")
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise ValueError(f"unknown dtype {str(dtype)[:32]!r}, known are {', '.join(ITEM_BYTES)}")
    shape: list[int] = []
    extent, num_elements = 1, 1
    for side in sides:
        if type(side) is not int or side < 0:  # not isinstance: True is an int too
            raise ValueError(f"side {str(side)[:32]} of a shape is not an integer >= 0")
        shape.append(side)
        extent *= side or 1
        num_elements *= side
        if extent > MAX_ELEMENTS:
            raise ValueError(f"a shape of {extent} elements, at most {MAX_ELEMENTS} are allowed")
    return known, tuple(shape), ITEM_BYTES[known] * num_elements


def _describe(value: object) -> list[object]:
    if not isinstance(value, WireTensor):
        raise TypeError(f"{type(value).__name__} does not travel")
    shape = list(value.shape)
    is_plain = len(shape) <= MAX_RANK and min(shape, default=0) > 0 and 0 < value.nbytes <= MAX_ELEMENTS
    if not is_plain:
        _checked([value.dtype, shape])
    return [value.dtype, shape]


def _take_as_checked(kind: type, description: object) -> WireTensor:
    """Ours: `_describe` has just looked at it."""
    return _NO_TENSOR


def _raw_bytes(tensor: WireTensor) -> memoryview:
    view = memoryview(tensor.data)
    if view.nbytes != tensor.nbytes:
        raise LocalProtocolError(f"{tensor} takes {tensor.nbytes} bytes, its data has {view.nbytes}")
    if not view.nbytes:
        return _NOTHING  # a view with a zero in its shape cannot be cast
    if not view.c_contiguous:
        raise LocalProtocolError(f"the data of {tensor} is not contiguous")
    return view.cast("B")


def _printable(text: str) -> str:
    """What a peer wrote, made safe for a terminal and a log."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_QUOTED])


def _tensor_fields(kind: type[Any]) -> tuple[str, ...]:
    fields = msgspec.structs.fields(kind)
    return tuple(field.name for field in fields if WireTensor in (field.type, *get_args(field.type)))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_describe)
_NO_TENSOR = WireTensor("float32", (0,), _NOTHING)
_CHECKER = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_take_as_checked)
_DTYPES: dict[str, DType] = {name: name for name in get_args(DType)}
_TENSOR_FIELDS: dict[type, tuple[str, ...]] = {kind: _tensor_fields(kind) for kind in get_args(AnyMessage)}
