"""Small random checkpoints, for tests and benchmarks: no download, the same numbers every time.

`write_tiny` writes six blocks of any family (`tiny.py`); `write_model_s` the model "S" of the baselines in
`docs/performance.md`. Neither has a tokenizer. `load_chain` joins both halves of a model again in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.models.cache import SpanCache
from corolla.models.checkpoint import Checkpoint
from corolla.models.family import quiet
from corolla.models.loading import load_span
from corolla.models.local_half import BlocksCall, LocalCache, LocalHalf, load_local_half
from corolla.models.quantization import Quantization
from corolla.models.span import Span
from corolla.models.tiny import tiny_config

_MODEL_S: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1376,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def write_tiny(
    directory: Path, family: str, *, seed: int = 0, max_shard_size: str = "200KB", **changes: object
) -> Path:
    """Write a random fp32 checkpoint of `tiny_config(family, **changes)`; the directory."""
    return _write(directory, tiny_config(family, **changes), seed, max_shard_size)


def write_model_s(directory: Path, *, seed: int = 0) -> Path:
    """Write the model S: llama, hidden 512, 8 blocks, fp32, 56 M parameters, 224 MB; its directory."""
    return _write(directory, CONFIG_MAPPING["llama"](**_MODEL_S), seed, "1GB")


def _write(directory: Path, config: PreTrainedConfig, seed: int, max_shard_size: str) -> Path:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        _perturb(model)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.no_grad()
def _perturb(model: PreTrainedModel) -> None:
    """Norms begin as ones and biases as zeros: a test that mixes them up must fail."""
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.add_(torch.randn(parameter.shape) * 0.02)


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `[start, end)` of a span in this process."""

    span: Span
    start: int
    end: int


class ChainCache(LocalCache):
    """A local cache that holds the caches of spans in this process."""

    def __init__(self, config: PreTrainedConfig, parts: Sequence[Part]) -> None:
        super().__init__(config)
        self.parts = parts
        self.span_caches: list[SpanCache] = []

    def trim(self, num_tokens: int) -> None:
        for cache in self.span_caches:
            cache.trim(num_tokens)
        super().trim(num_tokens)

    def gather(self, rows: Sequence[int]) -> None:
        for cache in self.span_caches:
            cache.gather(rows)
        super().gather(rows)

    def start(self, rows: int) -> None:
        if not self.span_caches:
            self.span_caches = [part.span.new_cache(rows, part.start, part.end) for part in self.parts]


class ChainedHalf(LocalHalf):
    """A local half whose blocks are spans in this process: what a swarm must equal, without a network."""

    parts: Sequence[Part] = ()
    whole_span: Span | None = None
    """All blocks once more in one span, where a test wants to run parts of it."""

    def new_local_cache(self, parts: Sequence[Part] | None = None) -> ChainCache:
        return ChainCache(cast("PreTrainedModel", self).config, self.parts if parts is None else parts)

    def one_by_one(self) -> list[Part]:
        """The whole span in as many parts as it can be cut into."""
        span = self.whole_span
        assert span is not None, "asked of a half that was loaded with it"
        borders = [0, *span.capabilities.cuts, span.end]
        return [Part(span, start, end) for start, end in pairwise(borders)]

    def run_blocks(self, call: BlocksCall) -> Tensor:
        cache = cast("ChainCache", call.cache)
        cache.start(call.hidden.shape[0])
        hidden = call.hidden
        for part, span_cache in zip(cache.parts, cache.span_caches, strict=True):
            hidden = part.span.forward(
                hidden,
                span_cache,
                position_ids=call.position_ids,
                left_padding=call.left_padding,
                token_ids=call.token_ids,
            )
        hidden = hidden.to(call.hidden.dtype)
        return hidden[:, -1:] if call.last_only else hidden


def load_chain(
    checkpoint: Checkpoint,
    cuts: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    span_dtype: torch.dtype | None = None,
    quantization: Quantization = "none",
    known: Span | None = None,
) -> ChainedHalf:
    """The whole model, cut at `cuts` (`[2, 3]` makes spans 0:2, 2:3 and 3:end), in this process; `known` as there."""
    borders = [0, *cuts, checkpoint.num_blocks]
    half = load_local_half(checkpoint, ChainedHalf, dtype=dtype)
    parts: list[Part] = []
    for start, end in pairwise(borders):
        known = parts[0].span if parts else known
        span = load_span(checkpoint, start, end, dtype=span_dtype or dtype, quantization=quantization, known=known)
        parts.append(Part(span, start, end))
    half.parts = parts
    return half
