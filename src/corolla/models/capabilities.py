"""What a loaded span can do, found out by trying: from signatures and a short run, never from a list of names.

The run puts a few random positions through the span in one piece and in several, with another session in between,
goes back and runs some again. A family that is not exact in chunks even by itself, whose state cannot be brought back
or is kept where other sessions reach it, or that looks ahead, shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from corolla.errors import BadInput
from corolla.models.cache import SpanCache
from corolla.models.dataflow import Dataflow
from corolla.models.family import CODE_FAILS, Structure, in_a_line

_NUM_TOKENS: Final = 8
Pieces = tuple[tuple[int, int], ...]
_CHUNKS: Final[Pieces] = ((0, 4), (4, 7), (7, 8))
_ONE_PIECE: Final[Pieces] = ((0, 6), (6, 7), (7, 8))

Run = Callable[[SpanCache, int, int], Tensor]


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
    try:
        at_once = run(span.new_cache(1), 0, _NUM_TOKENS)
    except CODE_FAILS as failure:
        raise BadInput(
            f"{structure.family}: its blocks do not run by themselves ({in_a_line(failure)}): its code does what "
            "corolla does not know (docs/families.md says what to do)"
        ) from failure
    if not bool(torch.isfinite(at_once).all()):
        raise BadInput(f"{structure.family}: the blocks give NaN or infinity: damaged weights, or too narrow a dtype")
    trial = _run_in_pieces(span, run, _CHUNKS)
    if trial is not None and not _is_close(trial.outputs[0], at_once[:, : trial.first_end]):
        raise BadInput(f"{structure.family}: later positions change earlier ones, so it is not a decoder")
    in_chunks = trial is not None and _is_close(torch.cat(trial.outputs, 1), at_once)
    if trial is None or not in_chunks:
        trial = _run_in_one_piece(span, run)
    num_new = trial.pieces[1][1] - trial.first_end
    per_token = (trial.sizes[1] - trial.sizes[0]) // num_new
    return Capabilities(
        family=structure.family,
        needs_token_ids=span.dataflow.needs_token_ids,
        takes_position_ids=structure.takes_position_ids,
        cuts=span.dataflow.cuts,
        can_trim=_trims_exactly(run, trial),
        prefill_in_chunks=in_chunks,
        cache_bytes_per_token=per_token,
        cache_bytes_per_row=max(0, trial.sizes[0] - per_token * trial.first_end),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """One session's run, piece by piece."""

    pieces: Pieces
    cache: SpanCache
    outputs: list[Tensor]
    sizes: list[int]
    """Bytes held after each piece."""

    @property
    def first_end(self) -> int:
        return self.pieces[0][1]


def _run_in_pieces(span: RunnableSpan, run: Run, pieces: Pieces, *, with_another: bool = True) -> _Trial | None:
    """Run all positions; after the first piece another session steps in between. None: the family's code raises."""
    trial = _Trial(pieces, span.new_cache(1), [], [])
    for first, last in pieces:
        try:
            trial.outputs.append(run(trial.cache, first, last))
        except CODE_FAILS:
            return None
        trial.sizes.append(trial.cache.used_bytes)
        if with_another and first == 0:
            run(span.new_cache(1), 1, last)
    return trial


def _run_in_one_piece(span: RunnableSpan, run: Run) -> _Trial:
    """A prompt, then single positions. Raises BadInput when that does not work or other sessions show in it."""
    family = span.structure.family
    alone = _run_in_pieces(span, run, _ONE_PIECE, with_another=False)
    trial = _run_in_pieces(span, run, _ONE_PIECE)
    if alone is None or trial is None:
        raise BadInput(f"{family}: its blocks cannot go on from a cache, not even by single positions")
    if not all(torch.equal(output, expected) for output, expected in zip(trial.outputs, alone.outputs, strict=True)):
        raise BadInput(f"{family}: its blocks keep state outside their cache, so sessions would mix")
    return trial


def _runner(span: RunnableSpan) -> Run:
    """A function that puts positions `[first, last)` of one random row through the span."""
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _NUM_TOKENS, span.structure.width, generator=chance).to(span.dtype)
    token_ids = torch.arange(_NUM_TOKENS)[None]

    def run(cache: SpanCache, first: int, last: int) -> Tensor:
        return span.forward(hidden[:, first:last], cache, token_ids=token_ids[:, first:last])

    return run


def _trims_exactly(run: Run, trial: _Trial) -> bool:
    """Go back to the end of the first piece and run the others again: the same shapes, so the same bits."""
    if not trial.cache.can_trim(trial.first_end):
        return False
    trial.cache.trim(trial.first_end)
    return all(
        torch.equal(run(trial.cache, first, last), before)
        for (first, last), before in zip(trial.pieces[1:], trial.outputs[1:], strict=True)
    )


def _is_close(output: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, which grows with the dtype's step.

    A quarter of the positions may differ more: in 16 bits, rounding sends a near-tie to another expert.
    """
    scale = float(expected.abs().max())
    error = (output - expected).float().abs().amax((0, 2))
    tolerance = scale * (1e-4 if output.dtype in (torch.float32, torch.float64) else 3e-2)
    return int((error > tolerance).sum()) * 4 <= len(error)
