"""Blocks held in fewer bits: near the model, as large as said, the same however a prompt is cut, or refused."""

import importlib.util

import pytest
import torch

from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.description import describe_model
from corolla.models.loading import load_span
from corolla.models.span import Span
from corolla.models.testing import load_chain, write_tiny

# Sizes that bitsandbytes' kernels for the CPU take: multiples of 64.
SETTINGS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(write_tiny(tmp_path_factory.mktemp("quantized"), "llama", **SETTINGS))


def hidden(num_tokens=NUM_TOKENS, rows=1, seed=0):
    return torch.randn(rows, num_tokens, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.full
@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("nf4", 4)])
def test_quantized_blocks_take_the_memory_that_was_said(quantization, bits, checkpoint):
    span = load_span(checkpoint, 1, 4, quantization=quantization)
    needs = describe_model(checkpoint, quantization=quantization).span(1, 4)
    assert needs.weight_bytes == pytest.approx(span.weight_bytes, rel=0.05)
    span.forward(hidden(), span.new_cache(1))
    assert needs.weight_bytes == pytest.approx(span.weight_bytes, rel=0.05), "no more of it after a step"
    full = describe_model(checkpoint).span(1, 4)
    assert needs.weight_bytes == pytest.approx(full.weight_bytes * bits / 32, rel=0.2)
    assert needs.download_bytes == full.download_bytes


@pytest.mark.full
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("nf4", 0.3)])
def test_quantized_logits_are_near_the_model_s_own(quantization, most, checkpoint):
    token_ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(3))
    exact, near = load_chain(checkpoint, [2]), load_chain(checkpoint, [2], quantization=quantization)
    with torch.no_grad():
        expected, found = exact(token_ids).logits, near(token_ids).logits
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < most


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_position_does_not_hang_on_later_ones_or_on_strangers_in_its_batch(quantization, checkpoint):
    span = load_span(checkpoint, 0, 3, quantization=quantization)
    whole = span.forward(hidden(), span.new_cache(1))
    loud = torch.cat([hidden(), hidden(seed=1) * 100])
    beside_a_stranger = span.forward(loud, span.new_cache(2))[:1]
    first_half = span.forward(hidden()[:, :6], span.new_cache(1))
    tolerance = 2e-2 * float(whole.abs().max())
    assert float((beside_a_stranger - whole).abs().max()) < tolerance
    assert float((first_half - whole[:, :6]).abs().max()) < tolerance


@pytest.mark.full
def test_a_cut_does_not_change_which_layers_are_quantized(checkpoint):
    whole = load_span(checkpoint, 0, 6, quantization="nf4")
    for index in range(6):
        alone = load_span(checkpoint, index, index + 1, quantization="nf4")
        expected = whole.blocks[index].state_dict()
        assert alone.blocks[0].state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in alone.blocks[0].state_dict().items())


@pytest.mark.full
def test_what_stands_outside_the_blocks_is_not_quantized(tiny):
    span = load_span(tiny("gemma3n_text"), 0, 2, quantization="int8")
    described = describe_model(tiny("gemma3n_text"), quantization="int8")
    assert described.side_bytes == describe_model(tiny("gemma3n_text")).side_bytes
    assert described.span(0, 2).weight_bytes == pytest.approx(span.weight_bytes, rel=0.05)


def test_without_the_library_a_sentence_says_what_to_install(checkpoint, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "bitsandbytes" else find_spec(name, *more)
    )
    with pytest.raises(BadInput, match=r"--quant nf4 needs bitsandbytes, .*: pip install 'corolla\[quant\]'"):
        load_span(checkpoint, 0, 1, quantization="nf4")


def test_a_width_that_four_bits_cannot_have_here_is_named(tiny, monkeypatch):
    checkpoint = tiny("llama")

    def fail(_span):
        raise BadInput("shape '[64, 1]' is invalid for input of size 96")  # as on a processor with AVX512

    monkeypatch.setattr(Span, "self_test", fail)
    with pytest.raises(
        BadInput,
        match=r"--quant nf4 .* 'model\.layers\.0\.mlp\.down_proj' takes 96 inputs, .* multiples of 64; --quant int8",
    ):
        load_span(checkpoint, 0, 1, quantization="nf4")
    with pytest.raises(BadInput, match="shape"):
        load_span(checkpoint, 0, 1, quantization="int8")


def test_what_the_kernels_cannot_run_is_refused_at_load(tiny):
    with pytest.raises(BadInput, match="mamba: its blocks do not run by themselves"):
        load_span(tiny("mamba"), 0, 2, quantization="int8")
