"""What a loaded span can do, found out by trying: from signatures and a short run, never from a list of names.

The run puts a few random positions through the span in one piece and in several, goes back and runs some again. A
family that is not exact in chunks even by itself, whose state cannot be brought back, or that looks ahead, shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from corolla.errors import BadInput
from corolla.models.cache import SpanCache
from corolla.models.dataflow import Dataflow
from corolla.models.family import Structure

_NUM_TOKENS: Final = 8
_CHUNKS: Final = ((0, 4), (4, 7), (7, 8))
_FIRST_END: Final = _CHUNKS[0][1]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a span can do and what its sessions cost."""

    family: str
    needs_token_ids: bool
    takes_position_ids: bool
    cuts: tuple[int, ...]
    """Where a span of this model may begin or end, besides the model's own ends."""
    can_trim: bool
    """Going back some positions and on from there is exact; else a session that must go back needs a replay."""
    prefill_in_chunks: bool
    """A prompt in chunks gives what it gives in one piece; else prefill in one piece, then single tokens."""
    cache_bytes_per_token: int
    """Of one row, at most: a sliding layer stops growing beyond its window."""
    cache_bytes_per_row: int
    """What a row costs whatever its length (recurrent state)."""


class RunnableSpan(Protocol):
    """What `find_capabilities` needs of a span."""

    @property
    def structure(self) -> Structure: ...
    @property
    def dataflow(self) -> Dataflow: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def new_cache(self, rows: int) -> SpanCache: ...
    def forward(self, hidden: Tensor, cache: SpanCache, *, token_ids: Tensor | None = None) -> Tensor: ...


def find_capabilities(span: RunnableSpan) -> Capabilities:
    """Try the span out. Raises BadInput when its weights give NaN or its family is not a decoder."""
    structure, run = span.structure, _runner(span)
    at_once = run(span.new_cache(1), 0, _NUM_TOKENS)
    if not bool(torch.isfinite(at_once).all()):
        raise BadInput(f"{structure.family}: the blocks give NaN or infinity: damaged weights, or too narrow a dtype")
    cache, sizes, outputs = span.new_cache(1), list[int](), list[Tensor]()
    for first, last in _CHUNKS:
        outputs.append(run(cache, first, last))
        sizes.append(cache.used_bytes)
    if not _is_close(outputs[0], at_once[:, :_FIRST_END]):
        raise BadInput(f"{structure.family}: later positions change earlier ones, so it is not a decoder")
    per_token = (sizes[1] - sizes[0]) // (_CHUNKS[1][1] - _FIRST_END)
    return Capabilities(
        family=structure.family,
        needs_token_ids=span.dataflow.needs_token_ids,
        takes_position_ids=structure.takes_position_ids,
        cuts=span.dataflow.cuts,
        can_trim=_trims_exactly(run, cache, outputs),
        prefill_in_chunks=_is_close(torch.cat(outputs, 1), at_once),
        cache_bytes_per_token=per_token,
        cache_bytes_per_row=max(0, sizes[0] - per_token * _FIRST_END),
    )


Run = Callable[[SpanCache, int, int], Tensor]


def _runner(span: RunnableSpan) -> Run:
    """A function that puts positions `[first, last)` of one random row through the span."""
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _NUM_TOKENS, span.structure.width, generator=chance).to(span.dtype)
    token_ids = torch.arange(_NUM_TOKENS)[None]

    def run(cache: SpanCache, first: int, last: int) -> Tensor:
        return span.forward(hidden[:, first:last], cache, token_ids=token_ids[:, first:last])

    return run


def _trims_exactly(run: Run, cache: SpanCache, outputs: list[Tensor]) -> bool:
    """Go back to the end of the first chunk and run the others again: the same shapes, so the same bits."""
    if not cache.can_trim(_FIRST_END):
        return False
    cache.trim(_FIRST_END)
    return all(
        torch.equal(run(cache, first, last), before)
        for (first, last), before in zip(_CHUNKS[1:], outputs[1:], strict=True)
    )


def _is_close(output: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, which grows with the dtype's step.

    A quarter of the positions may differ more: in 16 bits, rounding sends a near-tie to another expert.
    """
    scale = float(expected.abs().max())
    error = (output - expected).float().abs().amax((0, 2))
    tolerance = scale * (1e-4 if output.dtype in (torch.float32, torch.float64) else 3e-2)
    return int((error > tolerance).sum()) * 4 <= len(error)
