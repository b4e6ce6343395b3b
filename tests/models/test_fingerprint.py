"""The fingerprint says which weights, not where they lie, who saved them or how they are split."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.testing import write_tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("original"), "llama", max_shard_size="1GB")


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def identity(directory):
    return fingerprint(open_checkpoint(directory))


def change_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(directory, change):
    file = directory / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file)


def test_it_is_32_hex_digits_and_the_same_every_time(original, copy):
    assert len(identity(original)) == 32
    assert int(identity(original), 16) >= 0
    assert identity(original) == identity(copy)


def test_sharding_does_not_change_it(original, tmp_path):
    sharded = write_tiny(tmp_path / "sharded", "llama", max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert identity(sharded) == identity(original)


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "/somewhere/else", "transformers_version": "9.9"},
        {"dtype": "bfloat16", "torch_dtype": "float16"},
        {"eos_token_id": [7, 8], "use_cache": False, "a_new_field": None},
    ],
)
def test_config_words_that_change_no_logits_do_not_change_it(original, copy, changes):
    change_config(copy, **changes)
    assert identity(copy) == identity(original)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"tie_word_embeddings": True},
    ],
)
def test_config_words_that_change_logits_change_it(original, copy, changes):
    change_config(copy, **changes)
    assert identity(copy) != identity(original)


def test_a_fine_tune_that_moved_all_weights_a_little_differs(original, copy):
    change_tensors(copy, lambda _name, tensor: tensor * 1.001)
    assert identity(copy) != identity(original)


def test_another_seed_another_shape_another_dtype_and_another_name_differ(original, copy, tmp_path):
    others = [identity(write_tiny(tmp_path / "seed", "llama", seed=1))]
    change_tensors(copy, lambda _name, tensor: tensor.to(torch.float16))
    others.append(identity(copy))
    others.append(identity(write_tiny(tmp_path / "wider", "llama", intermediate_size=112)))
    assert len({identity(original), *others}) == 4


def test_a_change_in_any_small_tensor_that_is_sampled_differs(original, copy):
    changed = 0
    for victim in open_checkpoint(original).tensors:
        shutil.copy(original / "model.safetensors", copy)
        change_tensors(copy, lambda name, tensor, victim=victim: tensor + 1 if name == victim else tensor)
        changed += identity(copy) != identity(original)
    assert changed == 16  # as many as are sampled, whatever their number


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(copy):
    checkpoint = open_checkpoint(copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(BadInput, match="truncated after it was opened"):
        fingerprint(checkpoint)
