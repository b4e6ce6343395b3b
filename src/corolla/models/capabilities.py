"""What a family's blocks can do, found out when they are loaded: from signatures and a short run, never from a list.

The run (`probe`) puts a few random positions through the span in one piece and in several, trims some and goes on:
a family whose own model is not exact in chunks, or whose state cannot be brought back, shows it here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor, nn

from corolla.errors import BadInput
from corolla.models.cache import SpanCache

Axis = Literal["batch", "tokens"]

_SIDE_INPUTS: Final = ("input_ids", "per_layer_input", "original_hidden_states")
"""Parameters of a block's forward that are made from token ids, besides the hidden state."""

PROBE_TOKENS: Final = 8
"""Length of the random stream that `probe` takes."""
_PROBE_CUTS: Final = ((0, 4), (4, 7), (7, 8))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded span can do and what its sessions cost."""

    family: str
    needs_token_ids: bool
    takes_position_ids: bool
    stream_shape: tuple[Axis | int, ...]
    """Shape of the hidden state between blocks: `("batch", "tokens", hidden_size)` for most families."""
    can_trim: bool
    """Trimming the last positions and going on is exact; else a session that must go back needs a replay."""
    prefill_in_chunks: bool
    """A prompt in chunks gives what it gives in one piece; else prefill in one piece, then single tokens."""
    cache_bytes_per_token: int
    """Of one row, at most: a sliding layer stops growing at its window."""
    cache_bytes_per_row: int
    """What a row costs whatever its length (recurrent state)."""


def needs_token_ids(owner: nn.Module, block: nn.Module) -> bool:
    """Whether the family's blocks need the token ids besides the hidden state."""
    of_block = inspect.signature(type(block).forward).parameters
    of_owner = inspect.signature(type(owner).forward).parameters
    return any(name in of_block for name in _SIDE_INPUTS) or "per_layer_inputs" in of_owner


class ProbedSpan(Protocol):
    """What `probe` needs of a span."""

    def new_cache(self, rows: int) -> SpanCache: ...
    def forward(self, hidden: Tensor, cache: SpanCache) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What a short run showed."""

    can_trim: bool
    prefill_in_chunks: bool
    cache_bytes_per_token: int
    cache_bytes_per_row: int


def probe(span: ProbedSpan, hidden: Tensor, token_axis: int) -> Probe:
    """Run `hidden`, a random stream of one row and 8 positions, in several ways. Raises BadInput when it gives NaN."""

    def run(cache: SpanCache, first: int, last: int) -> Tensor:
        return span.forward(hidden.narrow(token_axis, first, last - first), cache)

    at_once = run(span.new_cache(1), 0, PROBE_TOKENS)
    if not bool(torch.isfinite(at_once).all()):
        raise BadInput(
            "the blocks give NaN or infinity on a small random input: damaged weights, or too narrow a dtype"
        )
    cache = span.new_cache(1)
    sizes: list[int] = []
    outputs: list[Tensor] = []
    for first, last in _PROBE_CUTS:
        outputs.append(run(cache, first, last))
        sizes.append(cache.used_bytes)
    per_token = (sizes[1] - sizes[0]) // (_PROBE_CUTS[1][1] - _PROBE_CUTS[1][0])
    if not _is_close(outputs[0], at_once.narrow(token_axis, 0, _PROBE_CUTS[0][1]), token_axis):
        raise BadInput("later positions change what comes before them: the model is not a decoder")
    return Probe(
        can_trim=_trims_exactly(run, cache, outputs),
        prefill_in_chunks=_is_close(torch.cat(outputs, token_axis), at_once, token_axis),
        cache_bytes_per_token=per_token,
        cache_bytes_per_row=max(0, sizes[0] - per_token * _PROBE_CUTS[0][1]),
    )


def _trims_exactly(run: Callable[[SpanCache, int, int], Tensor], cache: SpanCache, outputs: list[Tensor]) -> bool:
    """Go back to the end of the first chunk and run the others again: the same shapes, so the same bits."""
    if not cache.can_trim(_PROBE_CUTS[0][1]):
        return False
    cache.trim(_PROBE_CUTS[0][1])
    return all(
        torch.equal(run(cache, first, last), before)
        for (first, last), before in zip(_PROBE_CUTS[1:], outputs[1:], strict=True)
    )


def _is_close(output: Tensor, expected: Tensor, token_axis: int) -> bool:
    """Equal but for rounding, which grows with the dtype's step.

    A quarter of the positions may differ more: in 16 bits, rounding sends a near-tie to another expert.
    """
    scale = float(expected.abs().max())
    error = (output - expected).float().abs().transpose(0, token_axis).flatten(1).amax(1) / scale
    tolerance = 1e-4 if output.dtype in (torch.float32, torch.float64) else 3e-2
    return int((error > tolerance).sum()) * 4 <= len(error)
