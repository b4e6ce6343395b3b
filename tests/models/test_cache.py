"""A span's cache: bitwise what transformers' own holds, as large as it says, and able to go back or to say no."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from corolla.errors import NeedsReplay
from corolla.models.cache import GROWTH_TOKENS, SLIDING_SLACK_TOKENS, GrowingLayer
from corolla.models.loading import load_span
from corolla.models.tiny import TINY_WINDOW


def states(num_tokens, rows=2, seed=0):
    return torch.randn(2, rows, 4, num_tokens, 16, generator=torch.Generator().manual_seed(seed))


def both(layers, change):
    for layer in layers:
        change(layer)


def test_a_growing_layer_holds_what_a_concatenated_one_holds():
    layers = GrowingLayer(), DynamicLayer()
    for seed, num_tokens in enumerate((7, 1, GROWTH_TOKENS, 1, 1, GROWTH_TOKENS + 9, 1)):
        keys, values = states(num_tokens, seed=seed)
        ours, theirs = (layer.update(keys, values) for layer in layers)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert layers[0].get_mask_sizes(3) == layers[1].get_mask_sizes(3)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda layer: layer.crop(-3), id="crop"),
        pytest.param(lambda layer: layer.crop(-9), id="crop to nothing"),
        pytest.param(lambda layer: layer.reorder_cache(torch.tensor([1, 1, 0])), id="reorder"),
        pytest.param(lambda layer: layer.batch_select_indices(torch.tensor([1])), id="select"),
        pytest.param(lambda layer: layer.batch_repeat_interleave(2), id="repeat"),
        pytest.param(lambda layer: layer.reset(), id="reset"),
    ],
)
def test_a_growing_layer_goes_on_rightly_after(change):
    layers = GrowingLayer(), DynamicLayer()
    both(layers, lambda layer: layer.update(*states(9)))
    both(layers, change)
    rows = 2 if layers[1].keys is None else layers[1].keys.shape[0]
    for num_tokens in (2, 1):
        ours, theirs = (layer.update(*states(num_tokens, rows, seed=num_tokens)) for layer in layers)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_a_step_writes_in_place_until_the_buffer_is_full():
    layer = GrowingLayer()
    layer.update(*states(5))
    first = layer.keys.data_ptr()
    for _ in range(GROWTH_TOKENS):
        layer.update(*states(1))
    assert layer.keys.data_ptr() == first
    layer.update(*states(1))
    assert layer.keys.data_ptr() != first


@pytest.fixture(scope="module")
def llama_span(tiny):
    return load_span(tiny("llama"), 1, 3)


@pytest.fixture(scope="module")
def gemma_span(tiny):
    return load_span(tiny("gemma3_text"), 1, 4)


def hidden(span, num_tokens, rows=1, seed=0):
    return torch.randn(rows, num_tokens, span.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_the_cache_is_as_large_as_the_capabilities_say(llama_span):
    cache = llama_span.new_cache(2)
    assert cache.nbytes == 0
    llama_span.forward(hidden(llama_span, 10, rows=2), cache)
    llama_span.forward(hidden(llama_span, 1, rows=2), cache)
    per_token = llama_span.capabilities.cache_bytes_per_token
    assert per_token == 2 * 2 * 2 * 16 * 4  # blocks, keys and values, heads, head size, bytes
    assert cache.used_bytes == 2 * 11 * per_token
    assert cache.nbytes == 2 * (10 + GROWTH_TOKENS) * per_token


def test_gathering_rows_frees_the_rows_that_are_dropped(llama_span):
    cache = llama_span.new_cache(3)
    llama_span.forward(hidden(llama_span, 10, rows=3), cache)
    cache.gather([2])
    assert cache.rows == 1
    assert cache.nbytes == 10 * llama_span.capabilities.cache_bytes_per_token


def test_trimming_to_where_it_stands_or_to_nothing_works(llama_span):
    cache = llama_span.new_cache(1)
    first = llama_span.forward(hidden(llama_span, 6), cache)
    cache.trim(6)
    assert cache.num_tokens == 6
    cache.trim(0)
    assert cache.num_tokens == 0
    assert torch.equal(llama_span.forward(hidden(llama_span, 6), cache), first)


@pytest.mark.parametrize("target", [7, -1])
def test_trimming_to_where_it_never_was_needs_a_replay(llama_span, target):
    cache = llama_span.new_cache(1)
    llama_span.forward(hidden(llama_span, 6), cache)
    with pytest.raises(NeedsReplay, match="6 positions"):
        cache.trim(target)
    assert cache.num_tokens == 6


def test_a_sliding_layer_can_go_back_a_little_exactly_and_says_no_beyond(gemma_span):
    straight, trimmed = gemma_span.new_cache(1), gemma_span.new_cache(1)
    long, then = hidden(gemma_span, 40), hidden(gemma_span, 1, seed=1)
    for cache in (straight, trimmed):
        gemma_span.forward(long, cache)
    for seed in range(2, 12):  # ten single steps that will be taken back
        gemma_span.forward(hidden(gemma_span, 1, seed=seed), trimmed)
    trimmed.trim(40)
    assert torch.equal(gemma_span.forward(then, trimmed), gemma_span.forward(then, straight))

    far = gemma_span.new_cache(1)
    for seed in range(300):
        gemma_span.forward(hidden(gemma_span, 1, seed=seed), far)
    assert far.can_trim(300 - SLIDING_SLACK_TOKENS)
    assert not far.can_trim(10)
    with pytest.raises(NeedsReplay):
        far.trim(10)


def test_a_sliding_layer_s_memory_stays_bounded(gemma_span):
    cache = gemma_span.new_cache(1)
    sizes = []
    for seed in range(400):
        gemma_span.forward(hidden(gemma_span, 1, seed=seed), cache)
        sizes.append(max(layer.keys.shape[-2] for layer in cache.layers[1:4] if layer.is_sliding))
    assert max(sizes) <= 2 * (TINY_WINDOW - 1 + SLIDING_SLACK_TOKENS) + 1


def test_ghosts_answer_as_real_layers_do(tiny, gemma_span):
    everything = load_span(tiny("gemma3_text"), 0, 6)
    real, ghosted = everything.new_cache(1), gemma_span.new_cache(1)
    for num_tokens in (2, 1, 3, 1, 7, 1):
        everything.forward(hidden(everything, num_tokens), real)
        gemma_span.forward(hidden(gemma_span, num_tokens), ghosted)
        for index in range(6):
            assert ghosted.get_seq_length(index) == real.get_seq_length(index)
            assert ghosted.get_mask_sizes(4, index) == real.get_mask_sizes(4, index)
