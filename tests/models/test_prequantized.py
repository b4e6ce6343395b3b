"""A checkpoint that comes quantized loads as transformers loads it, or a sentence says what is missing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.description import describe_model
from corolla.models.loading import load_span
from corolla.models.testing import load_chain, write_tiny

SIDE = 128
"""Of the squares that share a scale."""
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [SIDE, SIDE],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}


def set_quantization(directory, settings):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings, "dtype": "bfloat16"}))


def pack(matrix):
    """Eight-bit floats and a scale for each square."""
    rows, columns = (-(-size // SIDE) for size in matrix.shape)
    packed, scales = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            square = (slice(row * SIDE, (row + 1) * SIDE), slice(column * SIDE, (column + 1) * SIDE))
            scales[row, column] = matrix[square].abs().max() / 448
            packed[square] = (matrix[square] / scales[row, column]).to(torch.float8_e4m3fn)
    return packed, scales


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A llama as DeepSeek packs theirs: matrices of the blocks as eight-bit floats."""
    directory = tmp_path_factory.mktemp("fp8")
    write_tiny(directory, "llama", max_shard_size="1GB", hidden_size=128, intermediate_size=256)
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 2 and "layers" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = pack(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    set_quantization(directory, FP8)
    return directory


def test_eight_bit_floats_are_unpacked_as_transformers_unpacks_them(fp8):
    chain, whole = load_chain(open_checkpoint(fp8), [2]), AutoModelForCausalLM.from_pretrained(fp8)
    ids = torch.tensor([[5, 17, 99, 3]])
    assert torch.equal(chain(ids).logits, whole(ids).logits)


@pytest.mark.parametrize("look", [describe_model, lambda checkpoint, **how: load_span(checkpoint, 0, 2, **how)])
def test_what_comes_quantized_is_not_quantized_once_more(look, fp8):
    with pytest.raises(BadInput, match=r"config\.json: its weights come quantized \(fp8\) .* leave --quant out"):
        look(open_checkpoint(fp8), quantization="nf4")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantized \(gptq\) and cannot be loaded here: .*optimum"),
        ({"quant_method": "awq", "bits": 4}, r"quantized \(awq\) and cannot be loaded here: .*gptqmodel"),
        (
            {"quant_method": "compressed-tensors"},
            r"\(compressed-tensors\) and cannot be loaded here: .*compressed.tensors",
        ),
        (
            {"quant_method": "of-my-own"},
            r"quantized \(of-my-own\) and cannot be loaded here: .*does not know of-my-own",
        ),
        ({"bits": 4}, "quantized .* and cannot be loaded here"),
    ],
)
def test_what_cannot_be_unpacked_here_is_refused_saying_what_is_missing(settings, says, tmp_path):
    write_tiny(tmp_path, "llama")
    set_quantization(tmp_path, settings)
    with pytest.raises(BadInput, match=says) as refusal:
        load_span(open_checkpoint(tmp_path), 0, 2)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)
