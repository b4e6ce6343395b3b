"""What it costs to lose a hop's state again and again, and how often bf16 then writes another text.

Four stages of S with a replica each. Every request to a stage loses the session's state there with 1 % probability
(table 1 of the Petals paper), over a text of 1,024 tokens. A lost state must be computed again from what the hop
before it has kept: a prefill of everything so far through one stage, which no protocol avoids without a second copy.
The bound is the time without losses plus those prefills, measured in this process.

In bf16 a replay computes in one long step what was computed token by token before; kernels round differently, and
where two tokens are nearly tied the other one may win. In fp32 the tokens are the same.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from corolla.apps.bench.ends import Ends
from corolla.apps.bench.fleet import Fleet
from corolla.apps.bench.fragile import FragileSession, Loss, Written, draw_losses, write
from corolla.apps.bench.generation import prompt_of
from corolla.apps.bench.replay_cost import replay_cost_s
from corolla.apps.bench.setup import ONE_THREAD, describe_setup, model_s, spread
from corolla.apps.cli.network import client_network
from corolla.apps.processes import Processes
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm, join_swarm
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.tensors import wire_dtype
from corolla.net.libp2p.transport import open_transport

SPANS: Final = ("0:2", "2:4", "4:6", "6:8")
RATE: Final = 0.01
LENGTH: Final = 1024
PROMPT_TOKENS: Final = 16
AIM: Final = 0.85
OTHERS: Final = 0.20
NEAR_TIE_TOKENS: Final = 64
LOST_AT: Final = 24
CONFIG: Final = ClientConfig(shun_s=0.01)
"""A server that forgot a session is as good as before, and is soon wanted again."""


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


@dataclass(frozen=True, slots=True)
class Bench:
    """A joined swarm and the client's half of S in one number format."""

    swarm: Swarm
    model: ServedModel
    ends: Ends

    async def write(self, prompt: torch.Tensor, num_tokens: int, losses: Sequence[Loss] = ()) -> Written:
        session = FragileSession(
            self.swarm, self.model, CONFIG, max_tokens=prompt.shape[1] + num_tokens, max_rows=1,
            wire_dtype=wire_dtype(self.ends.embedding.dtype),
        )  # fmt: skip
        await session.start()
        try:
            return await write(session, self.ends, prompt, num_tokens, losses)
        finally:
            session.close()


def run(rounds: int, length: int, texts: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    model = model_s()
    console.print(f"corolla bench replay: {len(SPANS)} stages of S, a replica of each up\n{describe_setup()}")
    asyncio.run(_in_fp32(console, model, rounds, length, texts))
    asyncio.run(_in_bf16(console, model, texts))


async def _in_fp32(console: Console, model: Path, rounds: int, length: int, texts: int) -> None:
    async with _bench(model, torch.float32) as bench:
        _print_rates(console, await _measure_rates(bench, model, rounds, length), length)
        _print_differing(console, "fp32", await _count_differing(bench, texts), texts)


async def _in_bf16(console: Console, model: Path, texts: int) -> None:
    async with _bench(model, torch.bfloat16) as bench:
        _print_differing(console, "bf16", await _count_differing(bench, texts), texts)


@asynccontextmanager
async def _bench(model: Path, dtype: torch.dtype) -> AsyncIterator[Bench]:
    """Servers that compute in `dtype`, and a client that has joined them."""
    checkpoint = open_checkpoint(model)
    served = ServedModel(checkpoint.name, fingerprint(checkpoint), checkpoint.num_blocks)
    with Processes(ONE_THREAD) as processes:
        fleet = Fleet(processes, model, SPANS, ("--dtype", wire_dtype(dtype)), replicas=2)
        fleet.launch()
        fleet.wait_all()
        async with (
            open_transport(client_network()) as transport,
            join_swarm(transport, [fleet.address], CONFIG) as swarm,
        ):
            yield Bench(swarm, served, Ends.of(checkpoint, dtype))


async def _measure_rates(bench: Bench, model: Path, rounds: int, length: int) -> Rates:
    rates, prompt = Rates(), prompt_of(PROMPT_TOKENS)
    await bench.write(prompt, 32)  # warms everything up
    for number in range(rounds):
        losses = draw_losses(random.Random(number), length, len(SPANS), RATE)  # noqa: S311 - the same ones every time
        whole = await bench.write(prompt, length)
        lossy = await bench.write(prompt, length, losses)
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


async def _count_differing(bench: Bench, texts: int) -> int:
    """How many texts differ when one stage's state is computed again in the middle."""
    differing = 0
    for number in range(texts):
        prompt = prompt_of(PROMPT_TOKENS + number)
        whole = await bench.write(prompt, NEAR_TIE_TOKENS)
        lossy = await bench.write(prompt, NEAR_TIE_TOKENS, [(LOST_AT, number % len(SPANS))])
        assert lossy.recoveries, "nothing was lost"
        differing += whole.tokens != lossy.tokens
    return differing


def _span(blocks: str) -> tuple[int, int]:
    start, end = map(int, blocks.split(":"))
    return start, end


def _print_rates(console: Console, rates: Rates, length: int) -> None:
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


def _print_differing(console: Console, dtype: str, differing: int, texts: int) -> None:
    console.print(
        f"{dtype}: {differing} of {texts} texts of {NEAR_TIE_TOKENS} tokens differ after a replay at token {LOST_AT}"
    )
