"""Families with something unusual, over real servers: the same tokens and logits as in one process."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from corolla import AutoDistributedModelForCausalLM
from corolla.models.testing import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAMILIES = {
    "gemma3n_text": "servers need token ids, two streams flow between blocks, and each holds weights outside them",
    "zaya": "a second state travels behind the hidden state",
    "mamba": "a prompt goes in one piece, and nothing can be taken back",
    "zamba2": "blocks share weights that are stored once",
}
IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def address(running):
    """Of a peer that all join: so the servers of a family can start at the same time."""
    with running("bootstrap", "--json") as bootstrap:
        yield json.loads(bootstrap.stdout.readline())["addr"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_over_two_servers_writes_what_it_writes_alone(family, tmp_path, address, running):
    directory = write_tiny(tmp_path / family, family)
    with (
        running("serve", directory, "--blocks", "0:3", "--json", "--join", address) as first,
        running("serve", directory, "--blocks", "3:6", "--json", "--join", address) as second,
    ):
        alone = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for server in (first, second):
            json.loads(server.stdout.readline())
        model = AutoDistributedModelForCausalLM.from_pretrained(directory, initial_peers=[address])
        try:
            options = {"attention_mask": torch.ones_like(IDS), **GREEDY}
            assert torch.equal(model.generate(IDS, **options), alone.generate(IDS, **options))
            with torch.no_grad():
                assert torch.equal(model(IDS).logits, alone(IDS).logits)
        finally:
            model.close()
