"""A model in numbers, before a byte of its weights is read: what its blocks take in memory, download and cache.

Shapes come from the family's own model without data (meta device), bytes to download from the checkpoint's headers,
cache sizes from a run of that model without data. `corolla inspect` shows it, and a server plans its memory with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from corolla.errors import BadInput, as_ranges
from corolla.models.cache import SpanCache, with_calls
from corolla.models.checkpoint import Checkpoint
from corolla.models.dataflow import Dataflow
from corolla.models.dataless import Dataless, lists_without_values
from corolla.models.family import (
    CODE_FAILS,
    Structure,
    causal_class,
    inspect_family,
    outline_of,
    quiet,
    read_config,
    watch_family,
)
from corolla.models.loading import check_shape, checkpoint_dtype, needed_tensors, place_tensors
from corolla.models.prequantized import check_not_quantized_twice, quantization_of
from corolla.models.quantization import Quantization, bytes_when_quantized
from corolla.models.skeleton import find_blocks, prune, text_config

_FIRST_TOKENS: Final = 4
_MORE_TOKENS: Final = 3


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """What one row of a session takes in the cache of one block."""

    bytes_per_token: int
    bytes_per_row: int
    """Whatever its length: recurrent states."""
    most_tokens: int | None
    """Where it stops growing: somewhat beyond a sliding window; None: nowhere."""

    def bytes_for(self, num_tokens: int) -> int:
        """Of a row of `num_tokens`."""
        held = num_tokens if self.most_tokens is None else min(num_tokens, self.most_tokens)
        return self.bytes_per_row + held * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class SpanNeeds:
    """What hosting a span takes, in bytes."""

    weight_bytes: int
    download_bytes: int
    cache: tuple[CacheNeeds, ...]
    """Of each block."""

    def cache_bytes(self, num_tokens: int) -> int:
        """Of one session of one row of `num_tokens`."""
        return sum(needs.bytes_for(num_tokens) for needs in self.cache)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What hosting any span of a model, or using it, takes."""

    name: str
    commit: str | None
    """Of the hub's repository; None: the files are from elsewhere."""
    family: str
    num_blocks: int
    dtype: str
    quantization: Quantization
    max_positions: int | None
    width: int
    """Numbers for each position that travel between blocks."""
    cuts: tuple[int, ...]
    needs_token_ids: bool
    can_go_back: bool
    block_bytes: tuple[int, ...]
    """Memory of each block's weights, as they are held."""
    block_download_bytes: tuple[int, ...]
    block_missing_bytes: tuple[int, ...]
    """Of the download, what is not on this disk yet."""
    block_cache: tuple[CacheNeeds, ...]
    side_bytes: int
    """Weights outside the blocks that each server holds besides."""
    side_download_bytes: int
    client_bytes: int
    client_download_bytes: int

    def span(self, start: int, end: int) -> SpanNeeds:
        """What blocks `[start, end)` take."""
        return SpanNeeds(
            weight_bytes=sum(self.block_bytes[start:end]) + self.side_bytes,
            download_bytes=sum(self.block_download_bytes[start:end]) + self.side_download_bytes,
            cache=self.block_cache[start:end],
        )

    def largest_span(self, num_blocks: int) -> SpanNeeds | None:
        """The most that a span of `num_blocks` takes, wherever it lies; None: no such span can be cut."""
        borders = (0, *self.cuts, self.num_blocks)
        spans = [self.span(start, start + num_blocks) for start in borders if start + num_blocks in borders]
        return max(spans, key=lambda needs: needs.weight_bytes, default=None)


def describe_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, quantization: Quantization = "none"
) -> ModelDescription:
    """Look a model over without loading it.

    Raises BadInput when it cannot be cut at all, or not quantized so, or when its files hold blocks of other shapes
    than the config says, or not all blocks.
    """
    check_not_quantized_twice(checkpoint, quantization)
    config = read_config(checkpoint)
    family = causal_class(checkpoint, config)
    dtype = dtype or checkpoint_dtype(checkpoint, config)
    outline = outline_of(family, config, dtype)
    structure = inspect_family(outline)
    dataflow = watch_family(outline, structure)
    cache, can_go_back = _measure_cache(outline, structure, dataflow)
    block_bytes = tuple(bytes_when_quantized(block, quantization) for block in find_blocks(outline).blocks)
    parameters = dict(outline.named_parameters())
    downloads = _Downloads.of(checkpoint, outline, dataflow)
    if quantization_of(checkpoint) is None:  # else they are stored under names and in shapes of their own
        _check_blocks(checkpoint, outline, downloads)
    prune(outline, 0, 0, keep_ends=True)
    return ModelDescription(
        name=checkpoint.name,
        commit=checkpoint.commit,
        family=structure.family,
        num_blocks=dataflow.num_blocks,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization,
        max_positions=checkpoint.max_positions,
        width=structure.width,
        cuts=dataflow.cuts,
        needs_token_ids=dataflow.needs_token_ids,
        can_go_back=can_go_back,
        block_bytes=block_bytes,
        block_download_bytes=downloads.blocks,
        block_missing_bytes=downloads.missing,
        block_cache=cache,
        side_bytes=sum(parameters[name].nbytes for name in dataflow.side_parameters),
        side_download_bytes=downloads.side,
        client_bytes=sum(parameter.nbytes for parameter in outline.parameters()),
        client_download_bytes=sum(checkpoint.tensors[name].nbytes for name in needed_tensors(checkpoint, outline)),
    )


@dataclass(frozen=True, slots=True)
class _Downloads:
    """Stored bytes of each block, and of what each server needs besides."""

    blocks: tuple[int, ...]
    missing: tuple[int, ...]
    """Of each block's bytes those that are not on this disk."""
    side: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, outline: PreTrainedModel, dataflow: Dataflow) -> "_Downloads":
        """`outline`: the whole model. A tensor that several blocks share counts for each of them."""
        block_of = dict(_block_of_tensor(outline))
        sharers = _sharers(outline)
        blocks: list[list[str]] = [[] for _ in range(dataflow.num_blocks)]
        side = 0
        for name, target, _ in place_tensors(checkpoint, outline):
            targets = [target, *sharers.get(target, ())]
            for index in {block_of[target] for target in targets if target in block_of}:
                blocks[index].append(name)
            if not dataflow.side_parameters.isdisjoint(targets):
                side += checkpoint.tensors[name].nbytes
        sizes = tuple(sum(checkpoint.tensors[name].nbytes for name in names) for names in blocks)
        return cls(sizes, tuple(map(checkpoint.lacks, blocks)), side)


def _check_blocks(checkpoint: Checkpoint, outline: PreTrainedModel, downloads: _Downloads) -> None:
    """Numbers of a model that no server could load would mislead."""
    wanted = outline.state_dict()
    for name, target, is_as_stored in place_tensors(checkpoint, outline):
        if is_as_stored and target in wanted:
            check_shape(checkpoint, name, wanted[target])
    if empty := [index for index, num_bytes in enumerate(downloads.blocks) if not num_bytes]:
        raise BadInput(
            f"{checkpoint.directory}: holds no tensors of block(s) {as_ranges(empty)}, by config.json there should be "
            f"{len(downloads.blocks)} blocks"
        )


def _block_of_tensor(outline: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Names of the model's tensors that belong to a block, and to which."""
    place = find_blocks(outline)
    path = next(name for name, module in outline.named_modules() if module is place.blocks)
    for name in outline.state_dict():
        if name.startswith(f"{path}."):
            yield name, int(name.removeprefix(f"{path}.").partition(".")[0])


def _sharers(outline: PreTrainedModel) -> dict[str, list[str]]:
    """For each tensor that others are tied to, those others."""
    sharers: dict[str, list[str]] = {}
    for tensor, source in outline.all_tied_weights_keys.items():
        sharers.setdefault(source, []).append(tensor)
    return sharers


def _measure_cache(
    outline: PreTrainedModel, structure: Structure, dataflow: Dataflow
) -> tuple[tuple[CacheNeeds, ...], bool]:
    """What each block keeps of a session, and whether it can be brought back: from a run without data."""
    layers = [index for used in dataflow.cache_layers for index in used]
    kind = with_calls(SpanCache, structure.special.cache_calls)
    cache = kind(text_config(outline.config), 0, dataflow.num_blocks, 1, layers)
    sizes = [_sizes_after(outline, structure, dataflow, cache, tokens) for tokens in (_FIRST_TOKENS, _MORE_TOKENS)]
    needs: list[CacheNeeds] = []
    for first, second, used in zip(*sizes, dataflow.cache_layers, strict=True):
        per_token = (second - first) // _MORE_TOKENS
        per_row = max(0, first - per_token * _FIRST_TOKENS)
        needs.append(CacheNeeds(per_token, per_row, cache.most_tokens_of(used)))
    return tuple(needs), cache.can_trim(_FIRST_TOKENS)


def _sizes_after(
    outline: PreTrainedModel, structure: Structure, dataflow: Dataflow, cache: SpanCache, num_tokens: int
) -> list[int]:
    """Bytes that each block holds after `num_tokens` more."""
    token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    arguments: dict[str, object] = {"input_ids": token_ids, "use_cache": True, structure.cache_argument: cache}
    try:
        with torch.no_grad(), quiet(), lists_without_values(), Dataless():
            find_blocks(outline).runner(**arguments, **structure.special.arguments)
    except CODE_FAILS as failure:
        raise BadInput(f"{structure.family}: its code does not run without data, so its cache is unknown") from failure
    cache.advance(num_tokens)
    return [cache.used_bytes_of(layers) for layers in dataflow.cache_layers]
