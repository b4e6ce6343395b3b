"""A tensor as it travels: dtype, shape and raw little-endian bytes, row-major. No torch here.

`models/tensors.py` turns these into torch tensors and back without copying where it can.
"""

import math
from typing import Final, Literal, final, get_args

DType = Literal["float32", "bfloat16", "float16", "int64"]

ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 1 << 26
"""Most elements of one tensor: what the largest message could hold at one byte each. Counted with every zero in the
shape as a one, so that an empty tensor cannot claim sides that overflow somebody's arithmetic."""

assert set(ITEM_BYTES) == set(get_args(DType))

Buffer = bytes | bytearray | memoryview


@final
class WireTensor:
    """`data` holds exactly `nbytes` bytes; a received one is a view of the message it came in.

    Not a dataclass: msgspec would then write `data` into the header by itself, and its `repr` would put
    activations into logs.
    """

    __slots__ = ("data", "dtype", "nbytes", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...], data: Buffer) -> None:
        self.dtype: Final = dtype
        self.shape: Final = shape
        self.data: Final = data
        self.nbytes: Final = ITEM_BYTES.get(dtype, 0) * math.prod(shape)
        """By dtype and shape, 0 of a dtype that does not travel; whether `data` has as many is looked at when it is
        sent."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WireTensor):
            return NotImplemented
        mine, theirs = (self.dtype, self.shape), (other.dtype, other.shape)
        return mine == theirs and memoryview(self.data).tobytes() == memoryview(other.data).tobytes()

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    def __repr__(self) -> str:
        return f"WireTensor({self.dtype}, {list(self.shape)})"
