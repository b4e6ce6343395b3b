"""Whether hidden states are numbers: no NaN, no infinity. Looked at in every step, so it has to cost next to nothing.

Measured on one core, 8 KB / 1 MB / 16 MB of bfloat16: this 2.4 µs / 20 µs / 0.8 ms; masking the exponents with numpy
2.4 µs / 42 µs / 5.9 ms; `torch.isfinite(x).all()` 40–60 µs / 6 ms / 140 ms.
"""

from typing import Final

import numpy as np

from corolla.wire.tensors import DType, WireTensor

_VIEWS: Final[dict[DType, tuple[str, str, int, int]]] = {
    "bfloat16": ("<i2", "<u2", 0x7F80, 0xFF80),
    "float16": ("<i2", "<u2", 0x7C00, 0xFC00),
    "float32": ("<i4", "<u4", 0x7F80_0000, 0xFF80_0000),
}
"""Signed and unsigned integers of the same size, and the bits of +infinity and of -infinity in them."""


def is_finite(tensor: WireTensor) -> bool:
    """No NaN and no infinity in it. Integers always are.

    A float's bits, read as a signed integer, grow with it while it is positive: +infinity and the positive NaN are
    the largest. Read as unsigned, -infinity and the negative NaN are. So two maxima tell, and nothing is copied.
    """
    if tensor.dtype == "int64" or not tensor.nbytes:
        return True
    signed, unsigned, infinity, minus_infinity = _VIEWS[tensor.dtype]
    return bool(
        np.frombuffer(tensor.data, signed).max() < infinity
        and np.frombuffer(tensor.data, unsigned).max() < minus_infinity
    )
