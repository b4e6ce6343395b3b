"""Tensors still on disk, which the ordinary loader reads when it comes to them.

transformers' loader takes a state dict and asks each entry for `[...]` only when it converts it. A server's tensors
are read by byte range straight into memory of their own: every step needs all of them. A client's are mapped: of the
embeddings it touches the rows of its own words only, and what the system drops under pressure it can read again.
"""

import mmap
from types import EllipsisType
from typing import Final

import torch
from torch import Tensor

from corolla.errors import BadInput
from corolla.models.checkpoint import TensorInfo
from corolla.models.tensors import bytes_of

STORED_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_ALIGNMENT: Final = 64
"""Bytes of a cache line and of the widest vector register."""


class StoredTensor:
    """A checkpoint's entry as transformers' loader wants it: `[...]` reads it, or maps it."""

    def __init__(self, info: TensorInfo, *, is_mapped: bool = False) -> None:
        self.info = info
        self.is_mapped = is_mapped
        self.read_bytes = 0
        """How many were read for it; what is mapped is read later, as it is touched."""
        self.shape = torch.Size(info.shape)
        self.dtype = stored_dtype(info)

    def get_dtype(self) -> str:
        """As safetensors' own lazy tensors say it; transformers' quantizers ask."""
        return self.info.dtype

    def __getitem__(self, _everything: EllipsisType) -> Tensor:
        if self.is_mapped:
            return map_tensor(self.info)
        tensor = read_tensor(self.info)
        self.read_bytes += self.info.nbytes
        return tensor


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor, read into memory of its own. Raises BadInput when the file has shrunk since it was opened."""
    content = _room_for(info)
    rest = bytes_of(content)
    try:
        with info.file.open("rb", buffering=0) as stream:
            stream.seek(info.start)
            while rest:
                num_read = stream.readinto(rest)
                if not num_read:
                    raise BadInput(f"{info.file}: ends before byte {info.end}; it was truncated after it was opened")
                rest = rest[num_read:]
    except OSError as error:
        raise BadInput(f"{info.file}: cannot be read: {error.strerror}") from error
    return content.view(stored_dtype(info)).reshape(info.shape)


def map_tensor(info: TensorInfo) -> Tensor:
    """One tensor, mapped from its file: memory is taken as it is touched, and changes stay here.

    The file may be removed meanwhile, but not cut. What cannot be mapped (nothing, or an element across a boundary)
    is read. Raises BadInput when the file has shrunk since it was opened.
    """
    dtype = stored_dtype(info)
    if not info.nbytes or info.start % dtype.itemsize:
        return read_tensor(info)
    first = info.start - info.start % mmap.ALLOCATIONGRANULARITY
    try:
        with info.file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), info.end - first, access=mmap.ACCESS_COPY, offset=first)
    except OSError as error:
        raise BadInput(f"{info.file}: cannot be read: {error.strerror}") from error
    except ValueError:
        raise BadInput(f"{info.file}: ends before byte {info.end}; it was truncated after it was opened") from None
    content = torch.frombuffer(mapped, dtype=torch.uint8, count=info.nbytes, offset=info.start - first)
    return content.view(dtype).reshape(info.shape)


def _room_for(info: TensorInfo) -> Tensor:
    """As many bytes as the tensor has, aligned as they are in the file.

    Some kernels round differently with the alignment of a weight (seen: a Linear of one output). A model that
    transformers loads by itself computes on the mapped file, so this keeps a span bitwise equal to it.
    """
    room = torch.empty(info.nbytes + _ALIGNMENT, dtype=torch.uint8)
    shift = (info.start - room.data_ptr()) % _ALIGNMENT
    shift = 0 if shift % stored_dtype(info).itemsize else shift
    return room[shift : shift + info.nbytes]


def stored_dtype(info: TensorInfo) -> torch.dtype:
    """torch's dtype of a stored tensor. Raises BadInput for one that torch cannot hold."""
    dtype = STORED_DTYPES.get(info.dtype)
    if dtype is None:
        raise BadInput(f"{info.file}: holds {info.dtype} tensors, which corolla cannot read")
    return dtype
