"""What a model is said to take is what its spans then take, in memory, download and cache."""

import itertools
import json

import pytest
import torch

from corolla.errors import BadInput
from corolla.models import stored
from corolla.models.checkpoint import open_checkpoint
from corolla.models.description import describe_model
from corolla.models.loading import load_span
from corolla.models.local_half import load_local_half
from corolla.models.stored import read_tensor
from corolla.models.testing import ChainedHalf, write_tiny

FAST = ("llama",)
SLOW = (
    "gemma3_text",
    "zamba2",
    "bloom",
    "gemma3n_text",
    "gpt2",
    "gpt_oss",
    "lfm2",
    "longcat_flash",
    "mamba",
    "mixtral",
    "qwen3_next",
)
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.full) for family in SLOW)]
CONTEXT = 300
DECODED = 80
LONG_CONTEXT = 8192


@pytest.fixture
def bytes_read(monkeypatch):
    """The bytes of tensors read since, as a list of one number."""
    total = [0]

    def counting_read(info):
        total[0] += info.nbytes
        return read_tensor(info)

    monkeypatch.setattr(stored, "read_tensor", counting_read)
    return total


def most_cache_bytes(span, num_tokens):
    """What a row of `num_tokens` takes at most while it grows: a sliding window is cut back now and then."""
    cache = span.new_cache(1)
    hidden = torch.randn(1, num_tokens, span.hidden_size, generator=torch.Generator().manual_seed(0)).to(span.dtype)
    token_ids = torch.arange(num_tokens)[None] % 100
    sizes = []
    for first, last in itertools.pairwise([0, *range(num_tokens - DECODED, num_tokens + 1)]):
        span.forward(hidden[:, first:last], cache, token_ids=token_ids[:, first:last])
        sizes.append(cache.used_bytes)
    return max(sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_takes_what_was_said_before_it_was_loaded(family, tiny, bytes_read):
    checkpoint = tiny(family)
    model = describe_model(checkpoint)
    assert bytes_read == [0], "nothing is read for it"
    for start, end in ((0, 2), (2, 5)):
        bytes_read[0] = 0
        span, needs = load_span(checkpoint, start, end), model.span(start, end)
        assert needs.weight_bytes == span.weight_bytes
        assert needs.download_bytes == pytest.approx(bytes_read[0], rel=0.01)
        assert needs.cache_bytes(CONTEXT) == pytest.approx(most_cache_bytes(span, CONTEXT), rel=0.05)
        assert sum(kept.bytes_per_token for kept in needs.cache) == span.capabilities.cache_bytes_per_token
        assert sum(kept.bytes_per_row for kept in needs.cache) == span.capabilities.cache_bytes_per_row
        assert model.needs_token_ids == span.capabilities.needs_token_ids
        assert model.cuts == span.capabilities.cuts
        assert model.can_go_back or not span.capabilities.can_trim


def test_what_a_long_session_allocates_is_what_was_said(tmp_path):
    """The room to grow counts too: it is lost in a context of the length that people ask for."""
    checkpoint = open_checkpoint(write_tiny(tmp_path, "llama", max_position_embeddings=LONG_CONTEXT))
    span = load_span(checkpoint, 0, 1)
    cache = span.new_cache(1)
    for _ in range(LONG_CONTEXT // 1024):
        span.forward(torch.randn(1, 1024, span.hidden_size), cache)
    assert cache.num_tokens == LONG_CONTEXT
    assert describe_model(checkpoint).span(0, 1).cache_bytes(LONG_CONTEXT) == pytest.approx(cache.nbytes, rel=0.05)


@pytest.mark.full
def test_a_cache_of_several_kinds_is_at_most_what_was_said(tiny):
    model, span = describe_model(tiny("deepseek_v4")), load_span(tiny("deepseek_v4"), 0, 4)
    assert 0 < most_cache_bytes(span, CONTEXT) <= model.span(0, 4).cache_bytes(CONTEXT)


@pytest.mark.parametrize("family", ["llama", "zamba2"])
def test_a_client_holds_what_was_said(family, tiny):
    checkpoint = tiny(family)
    half = load_local_half(checkpoint, ChainedHalf)
    assert describe_model(checkpoint).client_bytes == sum(parameter.nbytes for parameter in half.parameters())


def test_another_dtype_takes_as_much_less_memory_and_the_same_download(tiny):
    full = describe_model(tiny("llama")).span(1, 4)
    half = describe_model(tiny("llama"), dtype=torch.bfloat16).span(1, 4)
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.cache_bytes(CONTEXT) * 2 == full.cache_bytes(CONTEXT)
    assert half.download_bytes == full.download_bytes
    assert load_span(tiny("llama"), 1, 4, dtype=torch.bfloat16).weight_bytes == half.weight_bytes


def test_the_largest_span_of_a_size_is_told_where_blocks_differ(tiny):
    model = describe_model(tiny("deepseek_v3"))
    dense, of_experts = model.block_bytes[0], model.block_bytes[1]
    assert dense != of_experts
    assert model.largest_span(1).weight_bytes == max(dense, of_experts)
    assert model.largest_span(6).weight_bytes == sum(model.block_bytes)


def test_a_size_that_cannot_be_cut_out_has_no_numbers(tmp_path):
    model = describe_model(open_checkpoint(write_tiny(tmp_path, "gemma3n_text", num_kv_shared_layers=2)))
    assert model.cuts == (1, 2)
    assert model.largest_span(3) is None
    assert model.largest_span(4) == model.span(2, 6)


def test_a_family_that_cannot_be_cut_is_refused(tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path, "openai-gpt"))
    with pytest.raises(BadInput, match="openai-gpt: nothing runs its blocks over embeddings"):
        describe_model(checkpoint)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"intermediate_size": 104}, r"is \[64, 96\], by config.json it should be \[64, 104\]"),
        ({"num_key_value_heads": 1}, r"k_proj.weight' is \[32, 64\], by config.json it should be \[16, 64\]"),
        ({"num_hidden_layers": 9}, r"holds no tensors of block\(s\) 6:9, by config.json there should be 9 blocks"),
    ],
)
def test_files_that_do_not_fit_the_config_get_no_numbers(changes, sentence, tmp_path):
    config = write_tiny(tmp_path, "llama") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(BadInput, match=sentence):
        describe_model(open_checkpoint(tmp_path))
