"""Whether hidden states are numbers: no NaN, no infinity. Looked at in every step, so it has to cost next to nothing.

Of many bytes it is numpy: on one core, 1 MB / 16 MB of bfloat16 take 20 µs / 0.8 ms; masking the exponents 42 µs /
5.9 ms; `torch.isfinite(x).all()` 6 ms / 140 ms. Of few bytes, a decode step's, what counts is that the blocks' weights
have thrown numpy's code out of the caches: there 2 KB take it 75 to 100 µs, and a look at the bytes 15.
"""

from typing import Final

import numpy as np

from corolla.wire.tensors import DType, WireTensor

_FEW_BYTES: Final = 32 << 10
_VIEWS: Final[dict[DType, tuple[str, str, int, int]]] = {
    "bfloat16": ("<i2", "<u2", 0x7F80, 0xFF80),
    "float16": ("<i2", "<u2", 0x7C00, 0xFC00),
    "float32": ("<i4", "<u4", 0x7F80_0000, 0xFF80_0000),
}
"""Signed and unsigned integers of the same size, and the bits of +infinity and of -infinity in them."""
_HIGH_BYTES: Final[dict[DType, tuple[slice, bytes]]] = {
    "bfloat16": (slice(1, None, 2), b"\x7f\xff"),
    "float16": (slice(1, None, 2), b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"),
    "float32": (slice(3, None, 4), b"\x7f\xff"),
}
"""Where each number's highest byte is, and what it is in every NaN and infinity (and in few numbers)."""


def is_finite(tensor: WireTensor) -> bool:
    """No NaN and no infinity in it. Integers always are."""
    if tensor.dtype == "int64" or not tensor.nbytes:
        return True
    if tensor.nbytes <= _FEW_BYTES:
        where, suspicious = _HIGH_BYTES[tensor.dtype]
        high = bytes(tensor.data)[where]
        if len(high.translate(None, suspicious)) == len(high):
            return True
    return _is_finite_exactly(tensor)


def _is_finite_exactly(tensor: WireTensor) -> bool:
    """A float's bits, read as a signed integer, grow with it while it is positive: +infinity and the positive NaN are
    the largest. Read as unsigned, -infinity and the negative NaN are. So two maxima tell, and nothing is copied.
    """
    signed, unsigned, infinity, minus_infinity = _VIEWS[tensor.dtype]
    return bool(
        np.frombuffer(tensor.data, signed).max() < infinity
        and np.frombuffer(tensor.data, unsigned).max() < minus_infinity
    )
