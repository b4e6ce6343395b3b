"""What a model's files hold, read without torch: its config, and where every tensor's bytes lie.

Only `config.json`, the index and the shards' headers are read here, wherever the files come from (`files.py`). Every
number a header gives is checked before anything is read, downloaded or allocated by it; what cannot be a decoder's
safetensors checkpoint is refused as `BadInput`, in one sentence that names the file. Pickled weights are never opened.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, cast

from corolla.errors import BadInput
from corolla.models.files import LocalFiles, ModelFiles
from corolla.models.ranges import Range

MAX_HEADER_BYTES: Final = 100_000_000
"""The bound that the safetensors format itself sets on a header."""
FIRST_BYTES: Final = 65_536
"""What is held of each shard to begin with: as a rule its whole header, so one request each instead of two."""
MAX_BLOCKS: Final = 10_000
"""Announcements hold no more (`swarm/announcement.py`)."""

DTYPE_BITS: Final[dict[str, int]] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "consolidated.00.pth")
_LFS_POINTER = b"version "
"""How the text file begins that a clone without Git LFS has in the place of each large one."""
_BLOCK_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_BLOCK_LIST_KEYS = ("layers_block_type", "layer_types")
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_GENERATING = ("CausalLM", "LMHead", "ConditionalGeneration")
"""One of these is part of every class name that has a language model's head."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes `[start, end)` of `file`. `dtype` is safetensors' name (`F32`, `BF16`, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's description. `max_positions` is None when the family has no bound (alibi, recurrence)."""

    files: ModelFiles
    config: Mapping[str, object]
    num_blocks: int
    max_positions: int | None
    tensors: Mapping[str, TensorInfo]

    @property
    def directory(self) -> Path:
        """Where the files are; those of a hub's repository appear there as they are held."""
        return self.files.directory

    @property
    def name(self) -> str:
        """What people call the model: its directory's name, or the repository's."""
        return self.files.name

    @property
    def commit(self) -> str | None:
        """The hub's commit that the files belong to; None: they are from elsewhere."""
        return self.files.commit

    def hold(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """While inside, the bytes of these tensors lie in their files: downloaded if need be, kept from eviction.

        Raises BadInput or SwarmError when they cannot be had.
        """
        return self.files.hold(self._ranges(names))

    def lacks(self, names: Iterable[str]) -> int:
        """Bytes of these tensors that would have to be downloaded."""
        return self.files.lacks(self._ranges(names))

    def _ranges(self, names: Iterable[str]) -> dict[str, list[Range]]:
        ranges: dict[str, list[Range]] = {}
        for name in names:
            info = self.tensors[name]
            ranges.setdefault(info.file.name, []).append((info.start, info.end))
        return ranges


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in the directory `path`. Raises BadInput, naming the file, when it cannot be one."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        what = "is a file, not a model directory" if directory.exists() else "no such model directory"
        raise BadInput(f"{directory}: {what}")
    return read_checkpoint(LocalFiles(directory))


def read_checkpoint(files: ModelFiles) -> Checkpoint:
    """The checkpoint in these files. Raises BadInput, naming the file, when it cannot be one."""
    config_file = files.directory / "config.json"
    config = _read_json_object(files, config_file.name, "no config.json, so this is not a model directory")
    _check_decoder(config_file, config)
    num_blocks = _num_blocks(config_file, config)
    return Checkpoint(
        files=files,
        config=MappingProxyType(config),
        num_blocks=num_blocks,
        max_positions=_first_count(config, _POSITION_KEYS),
        tensors=MappingProxyType(_read_tensors(files)),
    )


def _check_decoder(file: Path, config: dict[str, object]) -> None:
    if not isinstance(config.get("model_type"), str):
        raise BadInput(f"{file}: has no model_type, so its family is unknown")
    if config.get("is_encoder_decoder") is True:
        raise BadInput(f"{file}: {config['model_type']} is an encoder-decoder, corolla runs decoders only")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        names = [str(name) for name in cast("list[object]", architectures)]
        if not any(word in name for name in names for word in _GENERATING):
            raise BadInput(f"{file}: {', '.join(names)} is not a decoder with a language model's head")


def _num_blocks(file: Path, config: dict[str, object]) -> int:
    num_blocks = _first_count(config, _BLOCK_COUNT_KEYS) or _count_listed(config)
    if not num_blocks:
        raise BadInput(f"{file}: does not say how many blocks the model has ({', '.join(_BLOCK_COUNT_KEYS)})")
    if num_blocks > MAX_BLOCKS:
        raise BadInput(f"{file}: says {num_blocks} blocks, more than {MAX_BLOCKS} cannot be announced")
    return num_blocks


def _first_count(config: dict[str, object], keys: tuple[str, ...]) -> int | None:
    """The first of `keys` that holds a positive integer, here or in the nested text config."""
    nested = config.get("text_config")
    for source in (config, cast("dict[str, object]", nested) if isinstance(nested, dict) else {}):
        for key in keys:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _count_listed(config: dict[str, object]) -> int | None:
    """How many kinds of blocks a config lists where it gives no number."""
    listed = (config.get(key) for key in _BLOCK_LIST_KEYS)
    return next((len(cast("list[object]", kinds)) for kinds in listed if isinstance(kinds, list) and kinds), None)


def _read_tensors(files: ModelFiles) -> dict[str, TensorInfo]:
    if files.size_of(_INDEX) is not None:
        return _read_sharded(files)
    if files.size_of(_SINGLE) is not None:
        return _read_shards(files, [_SINGLE])[_SINGLE]
    for name in _PICKLES:
        if files.size_of(name) is not None:
            raise BadInput(f"{files.directory / name}: pickled weights can run code and are never opened; convert them")
    raise BadInput(f"{files.directory / _SINGLE}: missing, and no {_INDEX} either")


def _read_sharded(files: ModelFiles) -> dict[str, TensorInfo]:
    index_file = files.directory / _INDEX
    weight_map = _read_json_object(files, _INDEX, "missing").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index_file}: has no weight_map")
    shard_of = {
        tensor: _checked_name(index_file, name) for tensor, name in cast("dict[str, object]", weight_map).items()
    }
    names = list(dict.fromkeys(shard_of.values()))
    for name in names:
        if files.size_of(name) is None:
            raise BadInput(f"{files.directory / name}: missing shard, which {_INDEX} names")
    shards = _read_shards(files, names)
    tensors: dict[str, TensorInfo] = {}
    for tensor, name in shard_of.items():
        if tensor not in shards[name]:
            raise BadInput(f"{files.directory / name}: lacks the tensor {tensor!r}, which {_INDEX} promises")
        tensors[tensor] = shards[name][tensor]
    return tensors


def _checked_name(index_file: Path, name: object) -> str:
    """A shard's name; the index comes from strangers, so it may name files of its own directory only."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BadInput(f"{index_file}: names {name!r}, which is not a file of this directory")
    return name


def _read_shards(files: ModelFiles, names: list[str]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each safetensors file, its header checked against the file's size.

    All files take each of the two steps together: from a hub, that is two waits instead of two for every file.
    """
    sizes = {name: files.size_of(name) or 0 for name in names}
    with files.hold({name: [(0, min(size, FIRST_BYTES))] for name, size in sizes.items()}):
        data_starts = {name: _find_data(files.directory / name, size) for name, size in sizes.items()}
    with files.hold({name: [(0, data_start)] for name, data_start in data_starts.items()}):
        return {name: _read_header(files.directory / name, sizes[name], data_starts[name]) for name in names}


def _find_data(file: Path, file_bytes: int) -> int:
    """The offset at which tensor data begins, right after the header."""
    with _opened(file) as stream:
        prefix = stream.read(8)
    if len(prefix) < 8:
        raise BadInput(f"{file}: {file_bytes} bytes are too few for a safetensors file; it is truncated")
    if prefix == _LFS_POINTER:
        raise BadInput(f"{file}: is a pointer of Git LFS, the weights were not downloaded: run `git lfs pull` there")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise BadInput(
            f"{file}: its header claims {length} bytes, the format allows {MAX_HEADER_BYTES}; "
            "the file is damaged, or not safetensors"
        )
    if 8 + length > file_bytes:
        raise BadInput(f"{file}: its header claims {length} bytes, the file has {file_bytes}; it is truncated")
    return 8 + length


def _read_header(file: Path, file_bytes: int, data_start: int) -> dict[str, TensorInfo]:
    with _opened(file) as stream:
        stream.seek(8)
        header = _parse_object(file, stream.read(data_start - 8))
    tensors = {
        name: _tensor_info(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    }
    _check_layout(file, file_bytes, tensors)
    return tensors


def _tensor_info(file: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    """One header entry, its offsets made absolute. Raises BadInput when dtype, shape and bytes disagree."""
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS or shape is None or offsets is None or len(offsets) != 2:
        raise BadInput(f"{file}: the header's entry for {name!r} is malformed")
    first, last = offsets
    if (last - first) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise BadInput(f"{file}: {name!r} is said to be {dtype} {list(shape)}, but its range has {last - first} bytes")
    return TensorInfo(file, dtype, shape, data_start + first, data_start + last)


def _counts(value: object) -> tuple[int, ...] | None:
    """A JSON list of non-negative integers as a tuple; None when it is anything else."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        return None
    return tuple(cast("list[int]", items))


def _check_layout(file: Path, file_bytes: int, tensors: dict[str, TensorInfo]) -> None:
    """Ranges lie inside the file and share no byte."""
    previous_name, previous_end = "the header", 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.end > file_bytes:
            raise BadInput(
                f"{file}: has {file_bytes} bytes, {name!r} should end at byte {info.end}; the file is truncated"
            )
        if info.start < previous_end:
            raise BadInput(f"{file}: {previous_name!r} and {name!r} overlap")
        previous_name, previous_end = name, info.end


def _read_json_object(files: ModelFiles, name: str, if_missing: str) -> dict[str, object]:
    file, size = files.directory / name, files.size_of(name)
    if size is None:
        raise BadInput(f"{file}: {if_missing}")
    if size > MAX_HEADER_BYTES:
        raise BadInput(f"{file}: is larger than {MAX_HEADER_BYTES} bytes, which no honest one is")
    with files.hold({name: [(0, size)]}), _opened(file) as stream:
        return _parse_object(file, stream.read(size))


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None


def _parse_object(file: Path, content: bytes) -> dict[str, object]:
    try:
        value: object = json.loads(content, object_hook=_with_special_floats)
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: is not valid JSON where it should be") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: holds no JSON object where it should")
    return cast("dict[str, object]", value)


def _with_special_floats(value: dict[str, object]) -> object:
    """transformers writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`."""
    special = value.get("__float__")
    return float(special) if isinstance(special, str) and len(value) == 1 else value
