"""What all tests share: quiet threads, patient property tests, and a tokenizer for tiny random models."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two tests at once must not fight over cores

settings.register_profile("corolla", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("corolla")

NUM_WORDS = 128
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} eos {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path], None]:
    """Saves a tokenizer with a chat template into a model directory: words `w5` … `w127`, `eos` is token 2."""

    def write(directory: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["pad", "bos", "eos", "user", "assistant"] + [f"w{number}" for number in range(5, NUM_WORDS)]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="pad"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="pad", bos_token="bos", eos_token="eos", chat_template=TEMPLATE
        )
        fast.save_pretrained(directory)

    return write
