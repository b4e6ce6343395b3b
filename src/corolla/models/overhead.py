"""What the skeleton costs, and a tape saves: a span's forward against calling the same blocks directly.

The direct way calls the hosted blocks with what the skeleton gave them at the same position: rotary tables, masks and
positions come for free, so the difference is all that the family's forward, its pass-throughs and the injection cost.
Both ways alternate call by call, since the machine's speed drifts by more than the difference within seconds.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corolla.models.cache import SpanCache
from corolla.models.span import Span


@dataclass(frozen=True, slots=True)
class SpanOverhead:
    """Medians over all decode steps, in seconds."""

    num_blocks: int
    skeleton_s: float
    direct_s: float
    overhead_s: float
    """Median of the differences of neighbouring calls, which is steadier than the difference of the medians."""
    taped_overhead_s: float | None
    """The same for steps from a tape, which take less than the calls (negative); None: the span has none."""


@dataclass(frozen=True, slots=True)
class _BlockCall:
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@torch.inference_mode()
def measure_span_overhead(span: Span, *, context_tokens: int = 64, repeats: int = 200) -> SpanOverhead:
    """Time decode steps of one row at position `context_tokens`, skeleton or tape and direct in turn.

    `span` has no tapes yet, and may have some afterwards.
    """
    cache = span.new_cache(1)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(1, context_tokens, span.hidden_size, generator=generator).to(span.device, span.dtype)
    span.forward(prompt, cache)
    calls = _record_calls(span, prompt[:, -1:], cache)

    def by_span() -> Tensor:
        return span.forward(prompt[:, -1:], cache)

    def direct() -> Tensor:
        output = _call_directly(calls, prompt[:, -1:])
        cache.advance(1)
        return output

    def in_turn() -> list[tuple[float, float]]:
        assert torch.equal(_timed(by_span, cache)[1], _timed(direct, cache)[1]), "both ways compute the same"
        return [(_timed(by_span, cache)[0], _timed(direct, cache)[0]) for _ in range(repeats)]

    pairs = in_turn()
    taped_pairs = in_turn() if span.use_tapes() else []
    return SpanOverhead(
        num_blocks=span.num_blocks,
        skeleton_s=statistics.median(pair[0] for pair in pairs),
        direct_s=statistics.median(pair[1] for pair in pairs),
        overhead_s=_median_difference(pairs),
        taped_overhead_s=_median_difference(taped_pairs) if taped_pairs else None,
    )


def _median_difference(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(first - second for first, second in pairs)


def _timed(step: Callable[[], Tensor], cache: SpanCache) -> tuple[float, Tensor]:
    """Seconds one step takes, and its output; the cache goes back to where it was."""
    position = cache.num_tokens
    begin = time.perf_counter()
    output = step()
    seconds = time.perf_counter() - begin
    cache.trim(position)
    return seconds, output


def _record_calls(span: Span, hidden: Tensor, cache: SpanCache) -> list[_BlockCall]:
    """What the skeleton gives each hosted block in one decode step, but for the hidden state."""
    calls: list[_BlockCall] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "x")}
        calls.append(_BlockCall(block, args[1:], others))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in span.blocks]
    try:
        _timed(lambda: span.forward(hidden, cache), cache)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _call_directly(calls: list[_BlockCall], hidden: Tensor) -> Tensor:
    for call in calls:
        output = call.block(hidden, *call.args, **call.kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
    return hidden
