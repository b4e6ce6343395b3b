"""`python -m corolla.apps.demo.convert FILE.gguf DIRECTORY`: a GGUF model as bf16 safetensors with its tokenizer."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write the model in `gguf` to the directory `output`, unpacked to bfloat16, as transformers keeps models."""
    directory, name = str(gguf.parent), gguf.name
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, dtype=torch.bfloat16, **_unpacked()
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _unpacked() -> dict[str, Any]:
    """Packed weights cannot be saved. Versions of transformers that cannot keep them packed have no such setting."""
    setting = getattr(transformers, "GgufConfig", None)
    return {} if setting is None else {"quantization_config": setting(dequantize=True)}


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
