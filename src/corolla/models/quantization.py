"""Weights held in fewer bits: which modules that concerns, what they take then, and transformers' word for it.

The blocks' linear layers are quantized as they are read, by bitsandbytes; norms, biases, routers that are plain tensors
and experts fused into one tensor keep the span's dtype. Embeddings and head are the client's and are never quantized.
"""

import importlib.util
import logging
import math
from collections.abc import Iterator
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from corolla.errors import BadInput
from corolla.models.skeleton import find_blocks

Quantization = Literal["none", "int8", "nf4"]

_NF4_GROUP: Final = 64
"""Weights that share one scale."""
_NF4_SCALE_BYTES: Final = 3
"""Between 4 and the 2 to which bitsandbytes packs scales for a processor that multiplies bfloat16: 3 % from either."""
_NF4_TABLE_BYTES: Final = 16 * 4
_INT8_SCALE_BYTES: Final = 4


def quantization_config(quantization: Quantization, dtype: torch.dtype, outline: PreTrainedModel) -> BitsAndBytesConfig:
    """What `from_pretrained` takes. Raises BadInput, saying what to install, when bitsandbytes is not there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BadInput(
            f"--quant {quantization} needs bitsandbytes, which is not installed: pip install 'corolla[quant]'"
        )
    _quiet_bitsandbytes()
    inside = {id(module) for module in find_blocks(outline).blocks.modules()}
    outside = [
        name
        for name, module in outline.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in inside
    ]
    # Never empty: without names the last module of all is left out, of each span another one.
    options: dict[str, Any] = {"llm_int8_skip_modules": [*outside, "lm_head"]}
    if quantization == "int8":
        # With a threshold, columns are singled out by all positions run together, so what a position gives would hang
        # on its neighbours and on strangers in the batch (logits 2.4 apart). Without: perplexity 15.64, with 15.61.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, **options)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, **options)


def why_nf4_fails(outline: PreTrainedModel) -> str | None:
    """A sentence, where a layer of the blocks has a width that bitsandbytes does not take on every processor."""
    odd = next(((name, width) for name, width in _widths(outline) if width % _NF4_GROUP), None)
    if odd is None:
        return None
    return (
        f"--quant nf4 does not work here: {odd[0]!r} takes {odd[1]} inputs, and on this machine bitsandbytes computes "
        f"only with multiples of {_NF4_GROUP}; --quant int8 takes any"
    )


def _widths(outline: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """The blocks' linear layers, and how many numbers each takes."""
    inside = {id(module) for module in find_blocks(outline).blocks.modules()}
    for name, module in outline.named_modules():
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D):
            yield name, module.weight.shape[0 if isinstance(module, Conv1D) else 1]


def _quiet_bitsandbytes() -> None:
    """It says at each step that it computes in float16, and at the import what else one could install."""
    for name in ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)


def bytes_when_quantized(module: nn.Module, quantization: Quantization) -> int:
    """Memory that the module's weights take when they are loaded so."""
    quantized = {id(weight): weight for weight in _quantized_weights(module)} if quantization != "none" else {}
    kept = sum(parameter.nbytes for parameter in module.parameters() if id(parameter) not in quantized)
    return kept + sum(_quantized_bytes(weight, quantization) for weight in quantized.values())


def _quantized_weights(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        if isinstance(part, nn.Linear | Conv1D):
            yield part.weight


def _quantized_bytes(weight: torch.Tensor, quantization: Quantization) -> int:
    if quantization == "int8":
        return weight.numel() + _INT8_SCALE_BYTES * weight.shape[0]
    groups = math.ceil(weight.numel() / _NF4_GROUP)
    return math.ceil(weight.numel() / 2) + _NF4_SCALE_BYTES * groups + _NF4_TABLE_BYTES


def held_bytes(model: nn.Module) -> int:
    """Memory that a loaded model's weights take, with the scales of those that are quantized."""
    scales = sum(tensor.nbytes for module in model.modules() for tensor in _scales_of(module))
    return sum(parameter.nbytes for parameter in model.parameters()) + scales


def _scales_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside a layer's weight: with it until the first run, or in a state of its own."""
    places: list[Any] = [getattr(module, "weight", None), getattr(module, "state", None)]
    int8_scales = (getattr(place, "SCB", None) for place in places if place is not None)
    yield from [scales for scales in int8_scales if isinstance(scales, torch.Tensor)][:1]
    state: Any = getattr(places[0], "quant_state", None)
    if state is not None:
        yield state.absmax
        yield state.code
