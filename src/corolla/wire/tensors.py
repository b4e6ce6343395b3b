"""A tensor as it travels: dtype, shape and raw little-endian bytes, row-major. No torch here.

`models/tensors.py` turns these into torch tensors and back without copying where it can.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

DType = Literal["float32", "bfloat16", "float16", "int64"]

ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
MAX_RANK: Final = 8

assert set(ITEM_BYTES) == set(get_args(DType))

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class WireTensor:
    """`data` holds exactly `nbytes` bytes; a received one is a view of the message it came in."""

    dtype: DType
    shape: tuple[int, ...]
    data: Buffer

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor of this dtype and shape takes on the wire."""
    return ITEM_BYTES[dtype] * math.prod(shape)
