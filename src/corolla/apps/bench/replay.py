"""What it costs to lose a hop's state again and again.

Four stages of S with a replica each. Every request to a stage loses the session's state there with 1 % probability
(table 1 of the Petals paper), over a text of 1,024 tokens. A lost state must be computed again from what the hop
before it has kept: a prefill of everything so far through one stage, which no protocol avoids without a second copy.
The bound is the time without losses plus those prefills, measured in this process.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from corolla.apps.bench.fragile import Loss, draw_losses
from corolla.apps.bench.generation import prompt_of
from corolla.apps.bench.replay_cost import replay_cost_s
from corolla.apps.bench.setup import describe_setup, model_s, spread
from corolla.apps.bench.stages import Stages, joined_stages

SPANS: Final = ("0:2", "2:4", "4:6", "6:8")
RATE: Final = 0.01
PROMPT_TOKENS: Final = 16
AIM: Final = 0.85
OTHERS: Final = 0.20


@dataclass(slots=True)
class Rates:
    """Of each round: tokens per second without losses, with them, and what the replays alone would leave."""

    whole: list[float] = field(default_factory=list[float])
    lossy: list[float] = field(default_factory=list[float])
    bound: list[float] = field(default_factory=list[float])
    losses: list[int] = field(default_factory=list[int])

    @property
    def kept(self) -> list[float]:
        return [lossy / whole for lossy, whole in zip(self.lossy, self.whole, strict=True)]

    @property
    def bound_kept(self) -> list[float]:
        return [bound / whole for bound, whole in zip(self.bound, self.whole, strict=True)]

    @property
    def of_bound(self) -> list[float]:
        return [lossy / bound for lossy, bound in zip(self.lossy, self.bound, strict=True)]


def run(rounds: int, length: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    model = model_s()
    console.print(f"corolla bench replay: {len(SPANS)} stages of S, a replica of each up\n{describe_setup()}")
    _print(console, asyncio.run(_measure(model, rounds, length)), length)


async def _measure(model: Path, rounds: int, length: int) -> Rates:
    async with joined_stages(model, SPANS, torch.float32) as stages:
        return await _measure_rates(stages, model, rounds, length)


async def _measure_rates(stages: Stages, model: Path, rounds: int, length: int) -> Rates:
    rates, prompt = Rates(), prompt_of(PROMPT_TOKENS)
    await stages.write(prompt, 32)  # warms everything up
    for number in range(rounds):
        losses = draw_losses(random.Random(number), length, len(SPANS), RATE)  # noqa: S311 - the same ones every time
        whole = await stages.write(prompt, length)
        lossy = await stages.write(prompt, length, losses)
        assert whole.tokens == lossy.tokens, "the text differs after losses"
        replays_s = _replays_s(model, losses)
        rates.whole.append(length / whole.decode_s)
        rates.lossy.append(length / lossy.decode_s)
        rates.bound.append(length / (whole.decode_s + replays_s))
        rates.losses.append(len(losses))
    return rates


def _replays_s(model: Path, losses: Sequence[Loss]) -> float:
    """Seconds of compute that these losses cost at the least."""
    return sum(replay_cost_s(model, _span(SPANS[stage]), PROMPT_TOKENS + step) for step, stage in losses)


def _span(blocks: str) -> tuple[int, int]:
    start, end = map(int, blocks.split(":"))
    return start, end


def _print(console: Console, rates: Rates, length: int) -> None:
    console.print(f"{length} tokens, {RATE:.0%} of requests to a stage lose its state: {rates.losses} losses")
    table = Table("", "tokens/s", "kept", box=None, header_style="bold")
    table.add_row("no losses", spread(rates.whole), "1")
    table.add_row("bound: the replays' compute and nothing else", spread(rates.bound), spread(rates.bound_kept))
    table.add_row("with losses", spread(rates.lossy), spread(rates.kept))
    console.print(table)
    console.print(
        f"of the bound: {spread(rates.of_bound)}: aim ≥ {AIM:.2f}. "
        f"Others keep {OTHERS:.0%} of the rate. Tokens equal in every round."
    )
    if max(rates.of_bound) > 1:
        console.print(
            "More than the bound: the machine was busier at one time than at another. Measure on a quiet one."
        )
