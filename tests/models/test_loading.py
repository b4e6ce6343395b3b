"""A span reads its own bytes only, ends up with the whole model's weights, and finds out what it can do."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from corolla.errors import BadInput, NeedsReplay
from corolla.models import stored
from corolla.models.checkpoint import open_checkpoint
from corolla.models.description import describe_model
from corolla.models.loading import load_span
from corolla.models.local_half import load_local_half
from corolla.models.sound import is_finite
from corolla.models.stored import map_tensor, read_tensor
from corolla.models.testing import ChainedHalf, write_tiny


class CountingFile(io.FileIO):
    num_read = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        CountingFile.num_read += count
        return count


@pytest.fixture
def count_bytes(monkeypatch):
    """Counts what is read unbuffered, as weights are."""
    CountingFile.num_read = 0
    plain_open = Path.open

    def counting_open(path, mode="r", buffering=-1, **options):
        return CountingFile(path, "rb") if buffering == 0 else plain_open(path, mode, buffering, **options)

    monkeypatch.setattr(Path, "open", counting_open)
    return lambda: CountingFile.num_read


FAMILIES = [
    "llama",
    "gpt2",
    *(pytest.param(family, marks=pytest.mark.full) for family in ("mixtral", "deepseek_v3", "gpt_oss", "bloom")),
]


def bytes_of_blocks(checkpoint, start, end):
    def block_of(name):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        return numbers[0] if numbers else -1

    return sum(info.nbytes for name, info in checkpoint.tensors.items() if start <= block_of(name) < end)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_reads_the_bytes_of_its_blocks_and_no_others(family, tiny, count_bytes):
    checkpoint = tiny(family)
    span = load_span(checkpoint, 2, 5)
    assert count_bytes() == pytest.approx(bytes_of_blocks(checkpoint, 2, 5), rel=0.01)
    assert span.read_bytes == count_bytes(), "what it says of itself"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_local_half_maps_the_rest_and_reads_nothing(family, tiny, count_bytes, monkeypatch):
    checkpoint, mapped = tiny(family), []

    def noting_map(info):
        mapped.append(info.nbytes)
        return map_tensor(info)

    monkeypatch.setattr(stored, "map_tensor", noting_map)
    load_local_half(checkpoint, ChainedHalf)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert sum(mapped) == total - bytes_of_blocks(checkpoint, 0, 6)
    assert count_bytes() == 0


def test_a_span_has_the_whole_model_s_weights_on_its_blocks(tiny, whole):
    span, full = load_span(tiny("mixtral"), 2, 5), whole(tiny("mixtral"))
    for block, expected in zip(span.blocks, full.model.layers[2:5], strict=True):
        weights = block.state_dict()
        assert weights.keys() == expected.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.state_dict().items())
    assert span.weight_bytes == sum(p.nbytes for layer in full.model.layers[2:5] for p in layer.parameters())


def test_weights_are_aligned_as_in_the_file(tiny):
    checkpoint = tiny("llama")
    assert len({info.start % 64 for info in checkpoint.tensors.values()}) > 1
    for info in checkpoint.tensors.values():
        assert (read_tensor(info).data_ptr() - info.start) % 64 == 0


def test_a_family_with_a_recurrent_state_says_that_it_cannot_go_back(tmp_path):
    span = load_span(open_checkpoint(write_tiny(tmp_path / "mamba", "mamba")), 1, 4)
    assert not span.capabilities.can_trim
    assert not span.capabilities.prefill_in_chunks  # nor is the family's own model exact in chunks
    assert span.capabilities.cache_bytes_per_token == 0
    cache = span.new_cache(2)
    span.forward(torch.randn(2, 5, 64), cache)
    assert cache.nbytes == 2 * span.capabilities.cache_bytes_per_row
    with pytest.raises(NeedsReplay):
        cache.trim(4)


def test_a_family_with_a_cache_class_of_its_own_is_refused(tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "xlstm", "xlstm"))
    with pytest.raises(BadInput, match="xlstm: keeps its state in a way of its own"):
        load_span(checkpoint, 0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_span_computes_in_the_dtype_asked_for(dtype, tiny):
    span = load_span(tiny("llama"), 0, 2, dtype=dtype)
    assert span.dtype == dtype
    assert span.forward(torch.randn(1, 3, 64), span.new_cache(1)).dtype == dtype


def test_without_a_dtype_the_checkpoint_s_own_is_kept(tiny, tmp_path):
    assert load_span(tiny("llama"), 0, 1).dtype == torch.float32
    directory = shutil.copytree(tiny("llama").directory, tmp_path / "half")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert load_span(open_checkpoint(directory), 0, 1).dtype == torch.bfloat16
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    assert load_span(open_checkpoint(directory), 0, 1).dtype == torch.float32


def test_capabilities_are_found_by_trying(tiny):
    span = load_span(tiny("llama"), 1, 4)
    found = span.capabilities
    assert found.family == "llama"
    assert found.cuts == (1, 2, 3, 4, 5)
    assert found.can_trim
    assert found.prefill_in_chunks
    assert not found.needs_token_ids
    assert (span.num_blocks, span.hidden_size, span.start, span.end) == (3, 64, 1, 4)
    assert found.cache_bytes_per_token == 3 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("span", [(0, 7), (3, 3), (4, 2), (-1, 2), (6, 7)])
def test_a_span_outside_the_model_is_answered_with_the_valid_range(span, tiny):
    with pytest.raises(BadInput, match="has 6 blocks: START:END must keep 0 <= START < END <= 6"):
        load_span(tiny("llama"), *span)


@pytest.fixture
def damaged(tiny, tmp_path):
    """A copy of tiny llama in one file, changed by a function of its tensors."""

    def change(edit):
        directory = write_tiny(tmp_path / "damaged", "llama", max_shard_size="1GB")
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        return open_checkpoint(directory)

    return change


VICTIM = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_none_is_found_at_load_and_its_tensor_named(number, damaged):
    checkpoint = damaged(lambda tensors: tensors[VICTIM][7].fill_(number))
    with pytest.raises(BadInput, match=rf"model.safetensors: '{VICTIM}' holds NaN or infinity; the file is damaged"):
        load_span(checkpoint, 0, 2)
    load_span(checkpoint, 2, 4)  # nothing wrong with the others


def test_an_expert_that_nobody_chose_is_looked_at_too(tmp_path):
    directory = write_tiny(tmp_path / "experts", "mixtral", max_shard_size="1GB", num_local_experts=64)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if ".layers.1." in name and ".63.w1" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadInput, match=f"'{name}' holds NaN or infinity"):
        load_span(open_checkpoint(directory), 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_finite_tensors_pass_whatever_their_dtype(dtype):
    tensor = torch.linspace(-2, 2, 100).to(dtype)
    assert is_finite(tensor)
    tensor[50] = float("nan")
    assert not is_finite(tensor)


def test_integers_and_empty_tensors_are_finite():
    assert is_finite(torch.arange(3))
    assert is_finite(torch.empty(0))


def test_a_missing_tensor_is_named(damaged):
    checkpoint = damaged(lambda tensors: tensors.pop(VICTIM))
    with pytest.raises(BadInput, match=rf"lacks 1 of the model's tensors, '{VICTIM}' first"):
        load_span(checkpoint, 0, 2)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(damaged):
    checkpoint = damaged(lambda tensors: tensors.update({VICTIM: torch.zeros(97, 64)}))
    with pytest.raises(BadInput, match=rf"'{VICTIM}' is \[97, 64\], by config.json it should be \[96, 64\]"):
        load_span(checkpoint, 0, 2)


def test_a_shard_that_shrinks_while_it_is_read_is_noticed(tiny, tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "shrinking", "llama", max_shard_size="1GB"))
    with (checkpoint.directory / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(BadInput, match="truncated after it was opened"):
        load_span(checkpoint, 0, 6)


@pytest.mark.parametrize(
    ("model_type", "says"), [("no_such_family", "knows no family 'no_such_family'"), ("vit", "vit is not a decoder")]
)
def test_a_family_that_is_no_decoder_is_refused(model_type, says, tiny, tmp_path):
    directory = shutil.copytree(tiny("llama").directory, tmp_path / "other")
    config = {"model_type": model_type, "num_hidden_layers": 6, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(directory)
    for load in (lambda: load_span(checkpoint, 0, 2), lambda: load_local_half(checkpoint, ChainedHalf)):
        with pytest.raises(BadInput, match=says):
            load()


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "nonsense"), ("num_attention_heads", 0), ("hidden_size", "x"), ("layer_types", ["full_attention"])],
)
def test_a_config_that_makes_no_sense_is_refused_with_what_transformers_says(field, value, tiny, tmp_path):
    directory = shutil.copytree(tiny("llama").directory, tmp_path / "other")
    config = json.loads((directory / "config.json").read_text()) | {field: value}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"llama.*this transformers \([\d.]+\).*(Error|Errors?): ") as refused:
        describe_model(open_checkpoint(directory))
    assert "\n" not in str(refused.value)


def test_more_blocks_than_tensors_are_refused_before_they_are_built(tiny, tmp_path):
    directory = shutil.copytree(tiny("llama").directory, tmp_path / "other")
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 9_999}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"config.json says 9999 blocks, the files hold \d+ tensors"):
        load_local_half(open_checkpoint(directory), ChainedHalf)


def test_an_encoder_that_calls_itself_a_language_model_is_refused(tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "bert", "bert", is_decoder=False))
    with pytest.raises(BadInput, match="bert: later positions change earlier ones, so it is not a decoder"):
        load_span(checkpoint, 0, 6)


def test_loading_leaves_transformers_talkative_as_it_was(tiny):
    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        load_span(tiny("llama"), 0, 1)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
