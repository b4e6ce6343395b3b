"""Whether a GGUF file's text (metadata and list of tensors) is all there, before any library reads by its numbers.

The library that unpacks GGUF believes every count: of a file that was cut off it says what numpy says of an empty
array, and an array that claims 2^60 elements keeps it busy until the memory is gone. Here the text is walked once, and
no number is believed further than the file goes. Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Final

from corolla.errors import BadInput

VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By the type's number: integers, floats and booleans."""
_MAX_DIMENSIONS: Final = 4
"""ggml's own bound."""


class _CutOff(Exception):
    """A number points beyond the end of the file."""


class _Damaged(Exception):
    """A number means nothing."""


class _Strange(Exception):
    """The file may well be in order, but is of a kind that is not read here."""


def check_gguf(file: Path) -> None:
    """Raises BadInput, in one sentence, when the file's text does not end in the file or lists what is not there."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Walk(content).whole()
    except _CutOff as fault:
        raise BadInput(f"{file}: has {size} bytes, {fault} should lie beyond; the file is truncated") from None
    except _Strange as fault:
        raise BadInput(f"{file}: {fault}") from None
    except _Damaged as fault:
        raise BadInput(f"{file}: {fault}; the file is damaged, or not GGUF") from None


class _Walk:
    """Goes through a file's text once. `at`: the byte after what was read."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = len(b"GGUF")

    def whole(self) -> None:
        version = self._uint32("its version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise _Strange("is a big-endian GGUF file, and only little-endian ones are read: take one of those")
        if version not in VERSIONS:
            raise _Damaged(f"says version {version}, known are {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_fields = self._uint64("its counts"), self._uint64("its counts")
        for number in range(num_fields):
            what = f"field {number + 1} of {num_fields}"
            self._skip(self._uint64(what), what)
            self._value(self._uint32(what), what)
        offsets = [self._tensor(f"the entry of tensor {number + 1} of {num_tensors}") for number in range(num_tensors)]
        if offsets:
            self._skip(max(offsets), "the last tensor")

    def _value(self, kind: int, what: str) -> None:
        if kind == _STRING:
            self._skip(self._uint64(what), what)
        elif kind == _ARRAY:
            self._array(what)
        else:
            self._skip(_bytes_of(kind, what), what)

    def _array(self, what: str) -> None:
        kind, count = self._uint32(what), self._uint64(what)
        if kind == _STRING:
            for _ in range(count):  # each takes 8 bytes at least, so the file's end is the bound
                self._skip(self._uint64(what), what)
        else:
            self._skip(count * _bytes_of(kind, what), what)

    def _tensor(self, what: str) -> int:
        """Where its data begins, counted from the end of the text."""
        self._skip(self._uint64(what), what)
        num_dimensions = self._uint32(what)
        if num_dimensions > _MAX_DIMENSIONS:
            raise _Damaged(f"{what} says {num_dimensions} dimensions, at most {_MAX_DIMENSIONS} are possible")
        self._skip(8 * num_dimensions + 4, what)
        return self._uint64(what)

    def _uint32(self, what: str) -> int:
        self._skip(4, what)
        return int(struct.unpack_from("<I", self._content, self._at - 4)[0])

    def _uint64(self, what: str) -> int:
        self._skip(8, what)
        return int(struct.unpack_from("<Q", self._content, self._at - 8)[0])

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._at:
            raise _CutOff(what)
        self._at += num_bytes


def _bytes_of(kind: int, what: str) -> int:
    num_bytes = _SCALAR_BYTES.get(kind)
    if kind == _ARRAY:  # the library could read them, but no model has one
        raise _Strange(f"{what} is an array of arrays, which is not read here")
    if num_bytes is None:
        raise _Damaged(f"{what} is of the unknown type {kind}")
    return num_bytes
