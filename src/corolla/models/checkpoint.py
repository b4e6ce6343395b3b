"""What a model's directory holds, read without torch: its config, and where every tensor's bytes lie.

Only `config.json`, the index and the shards' headers are read here. Every number a header gives is checked before
anything is read or allocated by it; what cannot be a decoder's safetensors checkpoint is refused as `BadInput`, in one
sentence that names the file. Pickled weights are never opened.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, cast

from corolla.errors import BadInput

MAX_HEADER_BYTES: Final = 100_000_000
"""The bound that the safetensors format itself sets on a header."""

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
_BLOCK_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
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
    """A model on disk. `max_positions` is None when the family has no bound (alibi, recurrence)."""

    directory: Path
    name: str
    config: Mapping[str, object]
    num_blocks: int
    max_positions: int | None
    tensors: Mapping[str, TensorInfo]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in the directory `path`. Raises BadInput, naming the file, when it cannot be one."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        what = "is a file, not a model directory" if directory.exists() else "no such model directory"
        raise BadInput(f"{directory}: {what}")
    config_file = directory / "config.json"
    config = _read_json_object(config_file, "no config.json, so this is not a model directory")
    _check_decoder(config_file, config)
    return Checkpoint(
        directory=directory,
        name=directory.resolve().name,
        config=MappingProxyType(config),
        num_blocks=_num_blocks(config_file, config),
        max_positions=_first_count(config, _POSITION_KEYS),
        tensors=MappingProxyType(_read_tensors(directory)),
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
    num_blocks = _first_count(config, _BLOCK_COUNT_KEYS)
    if not num_blocks:
        raise BadInput(f"{file}: does not say how many blocks the model has ({', '.join(_BLOCK_COUNT_KEYS)})")
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


def _read_tensors(directory: Path) -> dict[str, TensorInfo]:
    if (directory / _INDEX).is_file():
        return _read_sharded(directory)
    if (directory / _SINGLE).is_file():
        return _read_shard(directory / _SINGLE)
    for name in _PICKLES:
        if (directory / name).exists():
            raise BadInput(f"{directory / name}: pickled weights can run code and are never opened; convert them")
    raise BadInput(f"{directory / _SINGLE}: missing, and no {_INDEX} either")


def _read_sharded(directory: Path) -> dict[str, TensorInfo]:
    index_file = directory / _INDEX
    weight_map = _read_json_object(index_file, "missing").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index_file}: has no weight_map")
    file_of = cast("dict[str, object]", weight_map)
    shards = {name: _read_shard(_shard_path(index_file, name)) for name in dict.fromkeys(file_of.values())}
    tensors: dict[str, TensorInfo] = {}
    for tensor, name in file_of.items():
        if tensor not in shards[name]:
            raise BadInput(f"{directory / str(name)}: lacks the tensor {tensor!r}, which {_INDEX} promises")
        tensors[tensor] = shards[name][tensor]
    return tensors


def _shard_path(index_file: Path, name: object) -> Path:
    """A shard's path; the index comes from strangers, so it may name files of its own directory only."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BadInput(f"{index_file}: names {name!r}, which is not a file of this directory")
    path = index_file.with_name(name)
    if not path.is_file():
        raise BadInput(f"{path}: missing shard, which {_INDEX} names")
    return path


def _read_shard(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, its header checked against the file's size."""
    file_bytes = file.stat().st_size
    header, data_start = _read_header(file, file_bytes)
    tensors = {
        name: _tensor_info(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    }
    _check_layout(file, file_bytes, tensors)
    return tensors


def _read_header(file: Path, file_bytes: int) -> tuple[dict[str, object], int]:
    """The header's JSON object and the offset at which tensor data begins."""
    with _opened(file) as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise BadInput(f"{file}: {file_bytes} bytes are too few for a safetensors file; it is truncated")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise BadInput(f"{file}: its header claims {length} bytes, the format allows {MAX_HEADER_BYTES}")
        if 8 + length > file_bytes:
            raise BadInput(f"{file}: its header claims {length} bytes, the file has {file_bytes}; it is truncated")
        return _parse_object(file, stream.read(length)), 8 + length


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


def _read_json_object(file: Path, if_missing: str) -> dict[str, object]:
    if not file.is_file():
        raise BadInput(f"{file}: {if_missing}")
    with _opened(file) as stream:
        content = stream.read(MAX_HEADER_BYTES + 1)
    if len(content) > MAX_HEADER_BYTES:
        raise BadInput(f"{file}: is larger than {MAX_HEADER_BYTES} bytes, which no honest one is")
    return _parse_object(file, content)


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
