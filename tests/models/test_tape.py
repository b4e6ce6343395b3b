"""Tapes: a decode step of one row without the family's forward, to the bit, or not at all."""

import pytest
import torch

from corolla.models.cache import GROWTH_TOKENS
from corolla.models.loading import load_span

TAPED = ("llama", "qwen3", *(pytest.param(family, marks=pytest.mark.full) for family in ("gpt2", "phi")))
PROMPT_TOKENS = 5


def spans(checkpoint, start, end, dtype=None):
    """The same blocks twice: with tapes, and run by the family's forward alone."""
    taped = load_span(checkpoint, start, end, dtype=dtype)
    assert taped.use_tapes()
    return taped, load_span(checkpoint, start, end, dtype=dtype, known=taped)


def hidden(span, num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_tokens, span.hidden_size, generator=generator).to(span.dtype)


def unlike_steps(taped, plain, num_steps, start=None, end=None):
    """At which positions, beyond a prompt and across a trim, the two give other bits."""
    caches = [span.new_cache(1, start, end) for span in (taped, plain)]
    for span, cache in zip((taped, plain), caches, strict=True):
        span.forward(hidden(span, PROMPT_TOKENS), cache)
    unlike = []
    for step in range(num_steps):
        if step == num_steps - 2:
            for cache in caches:
                cache.trim(PROMPT_TOKENS + 1)
        one = hidden(plain, 1, seed=step)
        outputs = [span.forward(one, cache) for span, cache in zip((taped, plain), caches, strict=True)]
        if not torch.equal(*outputs):
            unlike.append(caches[0].num_tokens)
    assert caches[0].equals(caches[1])
    return unlike


@pytest.mark.parametrize("family", TAPED)
def test_a_tape_gives_the_forwards_bits_at_every_length(family, tiny):
    assert unlike_steps(*spans(tiny(family), 1, 5), num_steps=GROWTH_TOKENS + 10) == []


def test_a_tape_gives_the_forwards_bits_in_bfloat16(tiny):
    assert unlike_steps(*spans(tiny("llama"), 0, 4, torch.bfloat16), num_steps=20) == []


def test_a_session_that_began_before_the_recording_goes_on_to_the_bit(tiny):
    """A server records in a pause between steps, with sessions open."""
    checkpoint = tiny("llama")
    served, plain = load_span(checkpoint, 0, 4), load_span(checkpoint, 0, 4)
    caches = [span.new_cache(1) for span in (served, plain)]
    for step in range(8):
        if step == 4:
            assert served._recording is None
            assert served.use_tapes()
        one = hidden(plain, 1 if step else PROMPT_TOKENS, seed=step)
        assert torch.equal(*(span.forward(one, cache) for span, cache in zip((served, plain), caches, strict=True)))
    assert caches[0].equals(caches[1])
    assert served._tape.cache_info().hits >= 4, "the steps after it did not run from a tape"


def test_sessions_over_a_part_of_the_span_get_a_tape_of_that_part(tiny):
    taped, plain = spans(tiny("llama"), 0, 6)
    for start, end in ((0, 3), (2, 6), (1, 2)):
        assert unlike_steps(taped, plain, 12, start, end) == []
    assert taped._tape.cache_info().currsize == 4
    assert all(taped._tape(start, end) is not None for start, end in ((0, 3), (2, 6), (1, 2)))


def test_steps_that_no_tape_is_for_run_by_the_forward(tiny):
    taped, plain = spans(tiny("llama"), 0, 4)
    for rows, padding in ((2, None), (1, [2])):
        outputs = []
        for span in (taped, plain):
            cache = span.new_cache(rows)
            span.forward(hidden(span, 4).expand(rows, -1, -1), cache, left_padding=padding)
            outputs.append(span.forward(hidden(span, 1).expand(rows, -1, -1), cache, left_padding=padding))
        assert torch.equal(*outputs)


def test_positions_that_a_client_says_are_heard(tiny):
    taped, plain = spans(tiny("llama"), 0, 4)
    outputs = []
    for span, said in ((taped, [[9]]), (plain, [[9]]), (plain, None)):
        cache = span.new_cache(1)
        span.forward(hidden(span, 4), cache)
        positions = None if said is None else torch.tensor(said)
        outputs.append(span.forward(hidden(span, 1), cache, position_ids=positions))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("habit", ["a branch on the length", "a branch on a value", "a count", "a changed weight"])
def test_code_that_does_more_than_compute_leaves_no_tape(habit, tiny):
    span = load_span(tiny("llama"), 0, 2)
    attention = span.blocks[0].self_attn
    original, weight = attention.forward, attention.q_proj.weight
    count = attention.calls = 1000  # beyond the integers that Python shares

    def forward(hidden_states, past_key_values=None, **kwargs):
        if habit == "a branch on the length" and past_key_values.get_seq_length() > 100:
            hidden_states = hidden_states * 2
        if habit == "a branch on a value" and hidden_states.sum() > 0:
            hidden_states = hidden_states * 2
        if habit == "a count":
            attention.calls += 1
        if habit == "a changed weight":
            weight.mul_(1.0)
        return original(hidden_states, past_key_values=past_key_values, **kwargs)

    attention.forward = forward
    before = weight.clone()
    assert not span.use_tapes()
    assert attention.calls is count
    assert torch.equal(attention.q_proj.weight, before)


def test_a_tape_that_gives_other_bits_is_not_used(tiny, monkeypatch):
    span = load_span(tiny("llama"), 0, 2)
    monkeypatch.setattr("corolla.models.span.write_tape", lambda *_args, **_named: lambda hidden, *_rest: hidden)
    assert not span.use_tapes()
