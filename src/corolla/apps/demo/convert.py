"""`python -m corolla.apps.demo.convert FILE.gguf DIRECTORY`: a GGUF model as bf16 safetensors with its tokenizer."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write the model in `gguf` to the directory `output`, unpacked to bfloat16, as transformers keeps models."""
    directory, name = str(gguf.parent), gguf.name
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # packed weights cannot be saved
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
