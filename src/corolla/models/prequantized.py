"""Checkpoints that come quantized: which tensors they have, and whether what unpacks them is installed.

transformers' own quantizers do the work when the model is loaded. Here one is asked beforehand: it says what it lacks,
and changes the outline as it will change the model, so that the tensors it needs are found by their own names.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer, get_hf_quantizer
from transformers.quantizers.base import HfQuantizer

from corolla.errors import BadInput
from corolla.models.checkpoint import Checkpoint
from corolla.models.family import quiet
from corolla.models.quantization import Quantization


def quantizer_of(checkpoint: Checkpoint, outline: PreTrainedModel, device: torch.device | str) -> HfQuantizer | None:
    """What unpacks the checkpoint, with `outline` (on the meta device) made ready for it; None: it is not quantized.

    Raises BadInput, saying what is missing, when this machine cannot unpack it.
    """
    settings = quantization_of(checkpoint)
    if settings is None:
        return None
    method = str(settings.get("quant_method") or "an unnamed method")
    file = checkpoint.directory / "config.json"
    try:
        with quiet():
            if not cast("Any", AutoHfQuantizer).supports_quant_method(dict(settings)):
                raise ValueError(f"this transformers does not know {method}")
            places = None if str(device) == "cpu" else {"": device}
            config = copy.deepcopy(outline.config)  # what it notes there, it will note again when the model is loaded
            quantizer = cast("HfQuantizer", cast("Any", get_hf_quantizer)(config, None, places, True, {})[0])
            quantizer.preprocess_model(model=outline, dtype=outline.dtype, device_map=places)
    except (ImportError, ValueError, RuntimeError, TypeError, AttributeError, KeyError) as fault:
        raise BadInput(
            f"{file}: its weights are quantized ({method}) and cannot be loaded here: {_said(fault)}"
        ) from fault
    return quantizer


def check_not_quantized_twice(checkpoint: Checkpoint, quantization: Quantization) -> None:
    """Raises BadInput when weights that come quantized should be quantized once more."""
    settings = quantization_of(checkpoint)
    if settings is not None and quantization != "none":
        method = settings.get("quant_method") or "some other way"
        raise BadInput(
            f"{checkpoint.directory / 'config.json'}: its weights come quantized ({method}) and cannot be held as "
            f"{quantization} too: leave --quant out"
        )


def quantization_of(checkpoint: Checkpoint) -> Mapping[str, object] | None:
    """How the checkpoint's weights are quantized, by its config; None: they are not."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text):
        settings = (
            cast("Mapping[str, object]", config).get("quantization_config") if isinstance(config, Mapping) else None
        )
        if isinstance(settings, Mapping):
            return cast("Mapping[str, object]", settings)
    return None


def _said(fault: Exception) -> str:
    return next(iter(str(fault).strip().splitlines()), type(fault).__name__)
