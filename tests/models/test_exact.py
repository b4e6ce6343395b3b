"""The core promise: spans chained behind a local half give the whole model's logits, bit for bit."""

import inspect

import pytest
import torch
from transformers import DynamicCache

from corolla.models.testing import load_chain
from corolla.models.tiny import TINY_BLOCKS, TINY_VOCABULARY

FAST = ("llama",)
SLOW = ("gpt2", "qwen3", "mixtral", "gemma3_text", "bloom", "falcon", "deepseek_v3", "gpt_oss")
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.full) for family in SLOW)]
CUTS = ([], [2, 3], [1, 5], list(range(1, TINY_BLOCKS)))
"""One span; cuts inside and at the edge of a layer pattern; after the first and before the last; every block alone."""

CHUNKS = ((0, 7), (7, 11), (11, 12), (12, 13), (13, 14))
"""Two prefill chunks, the first beyond the tiny sliding window, then decode."""

PADDING = 3


def token_ids(rows=2):
    return torch.randint(3, TINY_VOCABULARY, (rows, CHUNKS[-1][1]), generator=torch.Generator().manual_seed(5))


def logits(model, cache, ids, padded):
    """The logits of every chunk; row 1 is padded at its left when `padded`. Positions of the padding itself are 0."""
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0 if padded else 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    parts = []
    for first, last in CHUNKS:
        extra = {"position_ids": position_ids[:, first:last]} if takes_positions else {}
        with torch.no_grad():
            output = model(
                ids[:, first:last],
                attention_mask=mask[:, :last] if padded else None,
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        parts.append(output.logits)
    joined = torch.cat(parts, 1)
    joined[mask == 0] = 0
    return joined


@pytest.mark.parametrize("family", FAMILIES)
def test_chained_spans_equal_the_whole_model_bitwise(family, tiny, whole):
    checkpoint = tiny(family)
    full = whole(checkpoint)
    expected = {padded: logits(full, DynamicCache(config=full.config), token_ids(), padded) for padded in (False, True)}
    assert expected[True].std() > 0.01, "constant logits would prove nothing"
    for cuts in CUTS:
        half = load_chain(checkpoint, cuts)
        for padded in (False, True):
            output = logits(half, half.new_local_cache(), token_ids(), padded)
            assert torch.equal(output, expected[padded]), f"cuts {cuts}, padded {padded}"


def test_bfloat16_is_bitwise_too_when_shapes_are_the_same(tiny, whole):
    full = whole(tiny("llama"), torch.bfloat16)
    half = load_chain(tiny("llama"), [2, 3], dtype=torch.bfloat16)
    expected = logits(full, DynamicCache(config=full.config), token_ids(), padded=True)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(logits(half, half.new_local_cache(), token_ids(), padded=True), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_trimming_three_positions_is_as_if_they_had_never_been(family, tiny):
    half = load_chain(tiny(family), [2, 3])
    ids = token_ids()
    with torch.no_grad():
        straight, trimmed = half.new_local_cache(), half.new_local_cache()
        for cache in (straight, trimmed):
            half(ids[:, :8], past_key_values=cache)
        half(ids[:, 11:14], past_key_values=trimmed)  # a draft that is rejected
        trimmed.crop(-3)
        assert trimmed.num_tokens == 8
        for first, last in ((8, 10), (10, 11)):
            expected = half(ids[:, first:last], past_key_values=straight).logits
            assert torch.equal(half(ids[:, first:last], past_key_values=trimmed).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_rows_go_on_as_in_the_whole_model(family, tiny, whole):
    half, full = load_chain(tiny(family), [2, 3]), whole(tiny(family))
    ids, rows = token_ids(rows=3), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        ours, theirs = half.new_local_cache(), DynamicCache(config=full.config)
        for model, cache in ((half, ours), (full, theirs)):
            model(ids[:, :8], past_key_values=cache)
            cache.reorder_cache(rows)
        for first, last in ((8, 10), (10, 11)):
            step = ids[rows.flip(0), first:last]
            expected = full(step, past_key_values=theirs).logits
            assert torch.equal(half(step, past_key_values=ours).logits, expected)


def test_gathered_rows_go_on_as_rows_that_were_computed_so(tiny):
    half = load_chain(tiny("llama"), [2, 3])
    ids, rows = token_ids(rows=3), [2, 0, 0]
    with torch.no_grad():
        gathered, computed = half.new_local_cache(), half.new_local_cache()
        half(ids[:, :8], past_key_values=gathered)
        half(ids[rows, :8], past_key_values=computed)
        gathered.gather(rows)
        expected = half(ids[:, 8:9], past_key_values=computed).logits
        assert torch.equal(half(ids[:, 8:9], past_key_values=gathered).logits, expected)


def test_dropping_and_repeating_rows_changes_the_batch(tiny):
    half = load_chain(tiny("llama"), [2])
    ids = token_ids(rows=3)
    with torch.no_grad():
        cache = half.new_local_cache()
        half(ids[:, :8], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        alone = half(ids[1:2, 8:9], past_key_values=cache).logits
        cache.batch_repeat_interleave(2)
        assert cache.rows == 2
        pair = half(ids[1:2, 9:10].expand(2, 1), past_key_values=cache).logits
    assert alone.shape[0] == 1
    assert torch.equal(pair[0], pair[1])
