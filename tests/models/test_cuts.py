"""What flows beside the hidden state is seen: it bounds the cuts, asks for token ids, or makes a family refused."""

import pytest
import torch
from torch import nn

from corolla.errors import BadInput, Unsupported
from corolla.models import parity
from corolla.models.checkpoint import open_checkpoint
from corolla.models.dataflow import watch_blocks
from corolla.models.loading import load_span
from corolla.models.skeleton import BlockList
from corolla.models.testing import write_tiny

SIZE = 4


class Chain(nn.Module):
    """Four blocks over an embedding; `run` says how they are called."""

    def __init__(self, run):
        super().__init__()
        self.embedding = nn.Embedding(8, SIZE)
        self.bias = nn.Parameter(torch.zeros(SIZE))
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        self.run = run


def watch(run):
    with torch.device("meta"):
        chain = Chain(run)
    place = BlockList(chain, "blocks", chain.blocks, chain)
    return watch_blocks(chain, place, lambda token_ids: chain.run(chain, token_ids), None)


def with_side_input(chain, token_ids):
    """Every block's output plus what `side` gives is the next one's input."""
    hidden = chain.embedding(token_ids)
    for block in chain.blocks:
        hidden = block(hidden + chain.bias)
    return hidden


def plain(chain, token_ids):
    hidden = chain.embedding(token_ids)
    for block in chain.blocks:
        hidden = block(hidden) * 2
    return hidden


def fed_with_embeddings(chain, token_ids):
    embedded = chain.embedding(token_ids)
    hidden = embedded
    for block in chain.blocks:
        hidden = block(hidden + embedded)
    return hidden


def skipping_from_the_second_to_the_last(chain, token_ids):
    first, second, third, last = chain.blocks
    kept = second(first(chain.embedding(token_ids)))
    return last(third(kept) + kept)


def written_into_a_shared_buffer(chain, token_ids):
    hidden = chain.embedding(token_ids)
    buffer = hidden.new_zeros(4, *hidden.shape)
    for index, block in enumerate(chain.blocks):
        hidden = block(hidden + buffer[0]) if index == 3 else block(hidden)
        if index == 0:
            buffer[0] = hidden
    return hidden


def read_by_the_head(chain, token_ids):
    outputs = [chain.embedding(token_ids)]
    for block in chain.blocks:
        outputs.append(block(outputs[-1]))
    return torch.stack(outputs).sum(0)


def run_twice(chain, token_ids):
    return plain(chain, token_ids) + plain(chain, token_ids)


def shaped_by_embeddings(chain, token_ids):
    hidden = chain.embedding(token_ids)
    nothing = torch.zeros_like(hidden)
    for block in chain.blocks:
        hidden = block(hidden + nothing)
    return hidden


def test_a_chain_can_be_cut_everywhere_whatever_is_done_between_its_blocks():
    flow = watch(plain)
    assert flow.cuts == (1, 2, 3)
    assert not flow.needs_token_ids
    assert not flow.side_parameters
    assert watch(shaped_by_embeddings) == flow


def test_weights_that_are_used_between_blocks_are_needed_by_every_server():
    flow = watch(with_side_input)
    assert flow.cuts == (1, 2, 3)
    assert flow.side_parameters == {"bias"}
    assert not flow.needs_token_ids


def test_embeddings_that_reach_later_blocks_need_token_ids_and_their_table():
    flow = watch(fed_with_embeddings)
    assert flow.cuts == (1, 2, 3)
    assert flow.needs_token_ids
    assert flow.side_parameters == {"embedding.weight"}


def test_no_cut_lies_between_a_block_and_one_that_uses_what_it_gave_earlier():
    assert watch(skipping_from_the_second_to_the_last).cuts == (1, 2)
    assert watch(written_into_a_shared_buffer).cuts == (1,)


@pytest.mark.parametrize(
    ("run", "says"),
    [(read_by_the_head, "uses more than the last one's hidden state"), (run_twice, "not run once each")],
)
def test_what_cannot_be_cut_at_all_is_refused(run, says):
    with pytest.raises(BadInput, match=says):
        watch(run)


@pytest.fixture
def try_changed(tmp_path, monkeypatch):
    """`try_family` on a tiny configuration changed by keyword."""

    def report(family, **changes):
        def write_changed(directory, family, **options):
            return write_tiny(directory, family, **options, **changes)

        monkeypatch.setattr(parity, "write_tiny", write_changed)
        return parity.try_family(family, tmp_path)

    return report


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_blocks_that_share_keys_stay_together_and_the_others_can_be_cut(family, try_changed, tmp_path):
    report = try_changed(family, num_kv_shared_layers=2)
    assert report.outcome == "right", report.detail
    assert report.can.cuts == (1, 2)
    with pytest.raises(BadInput, match=r"cannot be cut at 5: block 5 uses what block 2 keeps; it can be cut at: 1, 2"):
        load_span(open_checkpoint(tmp_path), 5, 6)
    with pytest.raises(Unsupported, match=r"blocks 0:5 of .* cannot run apart from their neighbours"):
        load_span(open_checkpoint(tmp_path), 0, 6).new_cache(1, 0, 5)


@pytest.mark.full
def test_outputs_that_the_head_collects_are_refused(try_changed):
    report = try_changed("inkling2_text", n_layers_per_attn_res_block=2)
    assert report.outcome == "refused"
    assert "what follows its blocks uses more than the last one's hidden state" in report.detail


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {"word_embed_proj_dim": 32}),
        ("opt", {"do_layer_norm_before": False}),
        ("falcon", {"alibi": True, "new_decoder_architecture": False}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ],
    ids=str,
)
def test_other_shapes_of_a_family_are_right_too(family, changes, try_changed):
    report = try_changed(family, **changes)
    assert report.outcome == "right", report.detail
    assert report.can.cuts == (1, 2, 3, 4, 5)
