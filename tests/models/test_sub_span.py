"""A session over part of a span computes what a span of just those blocks would, and shares its weights."""

import pytest
import torch

from corolla.models.loading import load_span
from corolla.models.tiny import TINY_BLOCKS

FAMILIES = [
    pytest.param(family, marks=[] if family == "llama" else [pytest.mark.full])
    for family in ("llama", "bloom", "gemma3_text", "gpt2", "deepseek_v3")
]
PARTS = ((2, 5), (3, 5), (2, 3), (3, 4), (4, 5))
STEPS = (7, 3, 1, 1)


def hidden(span, num_tokens, seed):
    return torch.randn(2, num_tokens, span.hidden_size, generator=torch.Generator().manual_seed(seed))


def run(span, cache):
    return [span.forward(hidden(span, length, seed), cache, left_padding=[0, 2]) for seed, length in enumerate(STEPS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_part_of_a_span_equals_a_span_of_its_own_bitwise(family, tiny):
    large = load_span(tiny(family), 2, 5)
    for start, end in PARTS:
        small = load_span(tiny(family), start, end)
        for ours, expected in zip(
            run(large, large.new_cache(2, start, end)), run(small, small.new_cache(2)), strict=True
        ):
            assert torch.equal(ours, expected), f"{start}:{end}"


def test_sessions_over_different_parts_take_turns_without_touching_each_other(tiny):
    large = load_span(tiny("llama"), 0, TINY_BLOCKS)
    alone = {part: run(large, large.new_cache(2, *part)) for part in PARTS}
    caches = {part: large.new_cache(2, *part) for part in PARTS}
    for seed, length in enumerate(STEPS):
        for part, cache in caches.items():
            output = large.forward(hidden(large, length, seed), cache, left_padding=[0, 2])
            assert torch.equal(output, alone[part][seed])


def test_a_chain_may_enter_and_leave_spans_in_their_middle(tiny):
    checkpoint = tiny("llama")
    first, second = load_span(checkpoint, 0, 4), load_span(checkpoint, 2, 6)
    whole = load_span(checkpoint, 0, 6)
    one, other, all_of_it = first.new_cache(2, 0, 3), second.new_cache(2, 3, 6), whole.new_cache(2)
    for seed, length in enumerate(STEPS):
        steps = hidden(whole, length, seed)
        chained = second.forward(first.forward(steps, one), other)
        assert torch.equal(chained, whole.forward(steps, all_of_it))


def test_a_cache_of_a_part_takes_memory_for_that_part_only(tiny):
    span = load_span(tiny("llama"), 0, 6)
    part, full = span.new_cache(2, 4, 6), span.new_cache(2)
    run(span, part)
    run(span, full)
    assert part.used_bytes * 3 == full.used_bytes
