"""`corolla inspect` tells people and programs what a model takes, and reads no weights for it."""

import json

import pytest

from corolla.apps.cli.main import run
from corolla.apps.inspect.page import size
from corolla.models import stored
from corolla.models.testing import write_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("llama") / "tiny-llama", "llama")


@pytest.fixture(autouse=True)
def _reads_no_weights(monkeypatch):
    def refuse(info):
        raise AssertionError(f"read a tensor of {info.file}")

    monkeypatch.setattr(stored, "read_tensor", refuse)
    monkeypatch.setattr(stored, "map_tensor", refuse)


def test_people_get_a_page(llama, capsys):
    assert run(["inspect", str(llama), "--context", "1000"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("tiny-llama: llama, 6 blocks, held as float32\n")
    for line in (
        "a block           123 KB in memory, 123 KB to download",
        "can be cut        everywhere",
        "hidden states",
    ):
        assert line in page
    assert "cache of 256 tokens" in page, "no more than the model can hold"


def test_programs_get_numbers_that_add_up(llama, capsys):
    assert run(["inspect", str(llama), "--json", "--blocks", "2:5", "--context", "100"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cuts"] == [1, 2, 3, 4, 5]
    (span,) = facts["spans"]
    assert span["blocks"] == "2:5"
    assert span["weight_bytes"] == sum(facts["block_bytes"][2:5])
    assert span["cache_bytes"] == 100 * sum(needs["bytes_per_token"] for needs in facts["block_cache"][2:5])
    assert span["memory_bytes"] == span["weight_bytes"] + span["cache_bytes"]


def test_fewer_bits_take_less(llama, capsys):
    weights = {}
    for quant in ("none", "int8", "nf4"):
        assert run(["inspect", str(llama), "--json", "--quant", quant]) == 0
        weights[quant] = json.loads(capsys.readouterr().out)["spans"][-1]["weight_bytes"]
    assert weights["none"] > 3 * weights["int8"] > 3 * weights["nf4"]


def test_a_family_with_other_needs_says_so(tmp_path, capsys):
    model = write_tiny(tmp_path / "shared", "gemma3n_text", num_kv_shared_layers=2)
    assert run(["inspect", str(model)]) == 0
    page = capsys.readouterr().out
    assert "can be cut        1, 2\n" in page
    assert "token ids: they can read prompts and replies" in page
    assert "of weights outside the blocks" in page
    assert "blocks stop growing at their window" in page


def test_blocks_outside_the_model_are_answered_with_the_valid_range(llama, capsys):
    assert run(["inspect", str(llama), "--blocks", "4:9"]) == 2
    assert "4:9 is no span of tiny-llama, which has 6 blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (7_080_192, "7.08 MB"), (999_700, "1 MB"), (10**13, "10 TB")],
)
def test_sizes_have_three_digits_and_a_unit(num_bytes, text):
    assert size(num_bytes) == text
