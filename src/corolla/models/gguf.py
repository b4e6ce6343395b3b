"""GGUF models: converted once into the cache, then an ordinary directory of safetensors with the family's tokenizer.

transformers reads the file and unpacks it; that takes as much memory as the unpacked model, in a process of its own,
so that it is given back: `python -m corolla.models.gguf FILE DIRECTORY`. Weights that the file keeps in float32 or
float16 stay so; packed ones become bfloat16.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import weakref
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

from corolla.errors import BadInput, SwarmError
from corolla.models.disk_cache import DiskCache, Say, build_once
from corolla.models.files import LocalFiles
from corolla.models.gguf_header import check_gguf

if TYPE_CHECKING:
    import torch

CONVERT_TIMEOUT_S: Final = 3600
"""SmolLM2 (135 M parameters) takes 12 s on two cores; what 70 B take is bound by the disk."""
MAGIC: Final = b"GGUF"
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096
_HEAD_BYTES: Final = 1 << 20


class NotConverted(SwarmError):
    """A GGUF file could not be converted; the message says why."""


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is or, when it is a directory without a config, holds. None: it is something else.

    Raises BadInput when a directory holds several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" or _has_magic(path) else None
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise BadInput(f"{path}: holds {len(found)} GGUF files ({names}{', …' if len(found) > 4 else ''}); name one")
    return found[0] if found else None


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def open_gguf(gguf: Path, cache: DiskCache, say: Say) -> LocalFiles:
    """The converted model's files, converted first if need be. Raises BadInput when that cannot be done."""
    if not _has_magic(gguf):
        raise BadInput(f"{gguf}: is not a GGUF file, whatever its name says")
    check_gguf(gguf)
    key = key_of(gguf)

    def build(directory: Path) -> None:
        say(f"converting {gguf.name} (once)")
        convert_apart(gguf, directory / gguf.stem)
        cache.reserve(0, gguf.name, lambda: None)  # what was built counts already: others may have to go

    lock = cache.use("gguf", key)
    try:
        files = LocalFiles(build_once(cache.root / "gguf" / key, build, say) / gguf.stem)
    except NotConverted as error:
        raise BadInput(str(error)) from None
    weakref.finalize(files, lock.close)
    return files


def key_of(gguf: Path) -> str:
    """Tells this file from others and from what it was before a change, without reading all of it."""
    status = gguf.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for number in range(_SAMPLES):
            file.seek(max(status.st_size - _SAMPLE_BYTES, 0) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def convert_apart(gguf: Path, output: Path) -> None:
    """Run the conversion in its own process: its memory goes with it, and it never looks for anything online.

    Raises NotConverted.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            [sys.executable, "-m", "corolla.models.gguf", str(gguf), str(output)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=CONVERT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as fault:
        raise NotConverted(f"converting {gguf.name} took more than {CONVERT_TIMEOUT_S} s") from fault
    if done.returncode:
        raise NotConverted(f"{gguf.name} could not be converted: {_last_words(done.stdout)}")


def _last_words(output: str) -> str:
    """The line in which a program most likely said why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line or "No module named" in line]
    return (errors or lines or ["it said nothing"])[-1]


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write the model in `gguf` to the directory `output`, unpacked, as transformers keeps models.

    Raises whatever goes wrong: it runs in a process of its own.
    """
    import transformers

    directory, name, dtype = str(gguf.parent), gguf.name, _dtype_to_keep(gguf, output)
    tokenizer = cast("Any", transformers.AutoTokenizer).from_pretrained(directory, gguf_file=name)
    model, report = cast("Any", transformers.AutoModelForCausalLM).from_pretrained(
        directory, gguf_file=name, dtype=dtype, output_loading_info=True, **_unpacked(transformers)
    )
    if missing := sorted(report["missing_keys"]):  # else they would be random numbers
        raise ValueError(f"error: lacks {len(missing)} of the model's tensors, {missing[0]} first")
    model.save_pretrained(output, max_shard_size="5GB")
    tokenizer.save_pretrained(output)


def _unpacked(transformers: ModuleType) -> dict[str, object]:
    """Packed weights cannot be saved. Versions of transformers that cannot keep them packed have no such setting."""
    setting = getattr(transformers, "GgufConfig", None)
    return {} if setting is None else {"quantization_config": setting(dequantize=True)}


def _dtype_to_keep(gguf: Path, output: Path) -> "torch.dtype":
    """The dtype that loses nothing of the file's matrices, bfloat16 for packed ones.

    Raises OSError without room, ValueError when a tensor's data is not all there.
    """
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        tensors = GGUFReader(str(gguf)).tensors
    except (ValueError, IndexError, KeyError) as fault:  # its text is in order (`check_gguf`), so it is the tensors
        raise ValueError(f"error: the file is truncated or damaged: {fault}") from fault
    kinds = {tensor.tensor_type for tensor in tensors if len(tensor.shape) > 1}
    whole = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    dtypes = {whole.get(kind, torch.bfloat16) for kind in kinds}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.bfloat16
    needed, free = (
        sum(int(tensor.n_elements) for tensor in tensors) * dtype.itemsize,
        shutil.disk_usage(output.parent).free,
    )
    if needed > free:
        raise OSError(
            f"error: takes {needed / 1e6:.0f} MB on the disk of {output.parent}, {free / 1e6:.0f} MB are free"
        )
    return dtype


def _read_once() -> None:
    """Keep what transformers asks gguf for again and again: all of the file's text (four times, seconds for a usual
    vocabulary), and the names of a family's tensors (once for each module). For a process that converts one file.
    """
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, lru_cache(maxsize=1)(getattr(gguf, name)))


if __name__ == "__main__":
    _read_once()
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
