"""The local half is a transformers model to its user, and holds no blocks."""

import threading

import pytest
import torch
from transformers import DynamicCache

from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.local_half import BlocksCall, LocalCache, LocalHalf, load_local_half
from corolla.models.testing import ChainedHalf, load_chain, write_tiny

IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.tensor([[1] * 9, [0, 0] + [1] * 7])

WAYS = {
    "greedy": {"do_sample": False},
    "greedy without a cache": {"do_sample": False, "use_cache": False},
    "left padding": {"do_sample": False, "attention_mask": LEFT_PADDED},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
    "several returned": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
def test_generate_writes_what_the_whole_model_writes(way, family, tiny, whole):
    written = []
    for model in (whole(tiny(family)), load_chain(tiny(family), [2, 3])):
        torch.manual_seed(7)
        options = {"attention_mask": torch.ones_like(IDS), **WAYS[way]}
        written.append(model.generate(IDS, max_new_tokens=10, eos_token_id=None, pad_token_id=0, **options))
    assert written[0].shape[1] == IDS.shape[1] + 10
    assert torch.equal(written[0], written[1])


def test_prompt_lookup_drafts_are_trimmed_away_exactly(tiny, whole):
    ids = IDS[:1].repeat(1, 3)  # repeats itself, so that there is something to look up
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    half = load_chain(tiny("llama"), [2])
    trims = []

    class Recorded(type(half.new_local_cache())):
        def trim(self, num_tokens):
            trims.append(self.num_tokens - num_tokens)
            super().trim(num_tokens)

    cache = Recorded(half.config, half.parts)
    drafted = half.generate(ids, prompt_lookup_num_tokens=3, past_key_values=cache, **options)
    assert torch.equal(drafted, whole(tiny("llama")).generate(ids, **options))
    assert sum(trims) > 0, "no draft was rejected, so nothing was tried"


def test_a_second_turn_goes_on_from_the_cache_of_the_first(tiny, whole):
    half, full = load_chain(tiny("llama"), [3]), whole(tiny("llama"))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    outputs = []
    for model, cache in ((half, half.new_local_cache()), (full, DynamicCache(config=full.config))):
        first = model.generate(IDS, past_key_values=cache, **options)
        assert cache.get_seq_length() == 13  # the last token is not in the cache yet
        outputs.append(model.generate(torch.cat([first, IDS], 1), past_key_values=cache, **options))
    assert torch.equal(outputs[0], outputs[1])


class Recorder(LocalHalf):
    """Notes what the blocks were asked for, and passes the hidden state on."""

    def run_blocks(self, call: BlocksCall) -> torch.Tensor:
        type(self).calls.append((call, call.cache.num_tokens))
        return call.hidden[:, -1:] if call.last_only else call.hidden


@pytest.fixture
def recorder(tiny):
    Recorder.calls = []
    return load_local_half(tiny("llama"), Recorder)


def test_generate_asks_for_the_last_position_only_and_sends_no_needless_fields(recorder):
    recorder.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [position for _, position in Recorder.calls] == [0, 9, 10]
    for call, _ in Recorder.calls:
        assert call.last_only
        assert call.keeps_cache
        assert (call.position_ids, call.left_padding) == (None, None)


def test_left_padding_reaches_the_blocks_as_counts_and_positions(recorder):
    recorder.generate(
        IDS, attention_mask=LEFT_PADDED, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    prefill, decode = (call for call, _ in Recorder.calls)
    assert prefill.left_padding == decode.left_padding == [0, 2]
    assert prefill.position_ids[1, 2:].tolist() == list(range(7))
    assert decode.position_ids.tolist() == [[9], [7]]


def test_a_forward_without_cache_asks_for_all_positions_and_keeps_nothing(recorder):
    output = recorder(IDS, use_cache=False)
    ((call, _),) = Recorder.calls
    assert (call.last_only, call.keeps_cache) == (False, False)
    assert output.logits.shape[:2] == (2, 9)
    assert output.past_key_values is None


def test_what_cannot_be_passed_on_is_refused(recorder):
    ones = torch.ones_like(IDS)
    with pytest.raises(BadInput, match="DynamicCache cannot hold"):
        recorder(IDS, past_key_values=DynamicCache())
    with pytest.raises(BadInput, match="zeros after ones"):
        recorder(IDS, attention_mask=LEFT_PADDED.flip(-1))
    with pytest.raises(BadInput, match=r"\[2, 5\].*9 positions"):
        recorder(IDS, attention_mask=ones[:, :5])
    cache = recorder.new_local_cache()
    recorder(IDS, past_key_values=cache)
    with pytest.raises(BadInput, match="holds 2 sequences, this input has 1"):
        recorder(IDS[:1], past_key_values=cache)
    with pytest.raises(BadInput, match="blocks are elsewhere"):
        recorder.model(IDS)
    with pytest.raises(BadInput, match="output_hidden_states is not possible"):
        recorder(IDS, output_hidden_states=True)


def test_a_failed_step_leaves_the_position_where_it_was(tiny):
    class Failing(LocalHalf):
        def run_blocks(self, call):
            raise ConnectionError

    half = load_local_half(tiny("llama"), Failing)
    cache = half.new_local_cache()
    with pytest.raises(ConnectionError):
        half(IDS, past_key_values=cache)
    assert cache.num_tokens == 0


def test_the_local_half_holds_no_block_and_keeps_the_family_s_name(tiny, whole):
    half, full = load_local_half(tiny("llama"), ChainedHalf), whole(tiny("llama"))
    assert {name for name, _ in half.named_parameters()} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert type(half).__name__ == type(full).__name__
    assert isinstance(half, type(full))
    assert half.generation_config.eos_token_id == full.generation_config.eos_token_id
    assert isinstance(half.new_local_cache(), LocalCache)


def test_the_base_class_runs_nothing_by_itself(tiny):
    with pytest.raises(NotImplementedError):
        load_local_half(tiny("llama"), LocalHalf)(IDS)


def test_a_model_of_one_block_is_right_too(tmp_path, whole):
    checkpoint = open_checkpoint(write_tiny(tmp_path, "llama", num_hidden_layers=1))
    with torch.no_grad():
        assert torch.equal(load_chain(checkpoint, [])(IDS).logits, whole(checkpoint)(IDS).logits)


def test_two_threads_share_a_half_without_mixing_their_outputs(tiny):
    half = load_chain(tiny("gpt2"), [])
    prompts, found = [IDS[:1], IDS[1:]], [None, None]
    with torch.no_grad():
        expected = [half(prompt).logits for prompt in prompts]
    run_blocks, lock, inside = half.run_blocks, threading.Lock(), threading.Barrier(2)

    def run_blocks_together(call):
        with lock:  # a span runs one step at a time
            output = run_blocks(call)
        inside.wait(timeout=30)  # neither leaves its blocks before the other has been through them
        return output

    half.run_blocks = run_blocks_together

    def run(index):
        with torch.no_grad():
            found[index] = half(prompts[index]).logits

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [32, 65])
def test_embeddings_of_another_size_are_refused_and_neither_cut_nor_filled_up(size, tiny):
    half = load_chain(tiny("llama"), [2])
    with pytest.raises(BadInput, match=rf"\[1, 3, {size}\].*\[batch, tokens, 64\]"):
        half(inputs_embeds=torch.zeros(1, 3, size))
