"""Which weights: 32 hex digits that every party computes from the files themselves, by a few range reads.

The hash covers the canonical config (what changes outputs, not paths, versions or the dtype of loading), the sorted
(name, dtype, shape) of all tensors, and 4 KB of each of 16 tensors, picked by the hash of the former two. So it does
not depend on how the tensors are spread over files, and a fine-tune differs. It tells mistakes, not lies: a peer can
announce whatever fingerprint it likes. Reads (from a hub: downloads) at most 64 KB, without torch.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from corolla.errors import BadInput
from corolla.ids import Fingerprint
from corolla.models.checkpoint import Checkpoint, TensorInfo
from corolla.models.ranges import Range

SAMPLED_TENSORS: Final = 16
SAMPLE_BYTES: Final = 4096

_IRRELEVANT: Final = frozenset(
    {
        # where it was saved, by what, under which name
        "_name_or_path",
        "name_or_path",
        "model_name",
        "_commit_hash",
        "transformers_version",
        "transformers.js_config",
        "architectures",
        "auto_map",
        "torchscript",
        # how it is loaded and run
        "dtype",
        "torch_dtype",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        # what the client does with the logits, and training
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_length",
        "task_specific_params",
        "id2label",
        "label2id",
        "problem_type",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
    }
)
"""Config keys, at any depth, that change no logits."""


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Which model `checkpoint` is, whatever its directory, sharding or display name."""
    outline = _outline_digest(checkpoint)
    digest = hashlib.sha256(outline)
    samples = [_sample_of(checkpoint.tensors[name], outline) for name in _picked(outline, checkpoint.tensors)]
    with checkpoint.files.hold(_ranges_of(samples)):
        for sample in samples:
            digest.update(_read_sample(sample))
    return Fingerprint(digest.hexdigest()[:32])


def _outline_digest(checkpoint: Checkpoint) -> bytes:
    """Digest of the canonical config and of every tensor's name, dtype and shape."""
    tensors = [(name, info.dtype, info.shape) for name, info in sorted(checkpoint.tensors.items())]
    canonical = json.dumps([_canonical(checkpoint.config), tensors], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def _canonical(value: object) -> object:
    """A config value without irrelevant keys, and without nulls: versions differ in which of them they write."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: _canonical(item) for key, item in items if key not in _IRRELEVANT and item is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in cast("list[object]", value)]
    return value


def _picked(outline: bytes, names: Mapping[str, TensorInfo]) -> list[str]:
    """The tensors to sample: those whose name, hashed with the outline, comes first."""
    return sorted(names, key=lambda name: _draw(outline, name))[:SAMPLED_TENSORS]


def _draw(outline: bytes, name: str) -> bytes:
    return hashlib.sha256(outline + name.encode()).digest()


@dataclass(frozen=True, slots=True)
class _Sample:
    """Bytes `[start, end)` of `file` that go into the hash."""

    file: Path
    start: int
    end: int


def _sample_of(info: TensorInfo, outline: bytes) -> _Sample:
    """4 KB of a tensor (all of a smaller one), from an offset that every party computes alike."""
    room = info.nbytes - SAMPLE_BYTES
    start = info.start + (int.from_bytes(outline[:8], "big") % (room + 1) if room > 0 else 0)
    return _Sample(info.file, start, start + min(SAMPLE_BYTES, info.nbytes))


def _ranges_of(samples: list[_Sample]) -> dict[str, list[Range]]:
    ranges: dict[str, list[Range]] = {}
    for sample in samples:
        ranges.setdefault(sample.file.name, []).append((sample.start, sample.end))
    return ranges


def _read_sample(sample: _Sample) -> bytes:
    with sample.file.open("rb") as stream:
        stream.seek(sample.start)
        content = stream.read(sample.end - sample.start)
    if len(content) < sample.end - sample.start:
        raise BadInput(f"{sample.file}: ends before byte {sample.end}; it was truncated after it was opened")
    return content
