"""What a hop costs: a decode step's time outside head and tail, less the compute that the servers measured.

Through the real client session, handler, session rules, scheduler and device thread, with S's blocks, round the ring:
one more server is one link more, and its own work.
The head and the tail run between the steps, as in a generation, so that caches are as cold as they are there.
Runs over 1, 2 and 4 servers alternate, since the machine drifts; the figure is the slope over the number of servers.
"""

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from corolla.apps.bench.echo import measure_echo
from corolla.apps.bench.ends import Ends
from corolla.apps.bench.setup import ONE_THREAD, Chain, describe_setup, in_rounds, model_s, spread, start_chains
from corolla.apps.cli.network import client_network
from corolla.apps.processes import Processes
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm, join_swarm
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.overhead import SpanOverhead, measure_span_overhead
from corolla.models.tensors import to_torch, to_wire
from corolla.net.libp2p.transport import open_transport

COUNTS = (1, 2, 4)
PROMPT_TOKENS = 16
DECODE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HopFigures:
    """Seconds per decode step, medians of each run."""

    steps_s: dict[int, list[float]]
    overheads_s: dict[int, list[float]]

    @property
    def slopes_s(self) -> list[float]:
        """Seconds that one more server adds to the overhead, one figure for each round of runs."""
        rounds = zip(*(self.overheads_s[count] for count in COUNTS), strict=True)
        return [statistics.linear_regression(COUNTS, overheads).slope for overheads in rounds]


def run(rounds: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    model = model_s()
    console.print(f"corolla bench hop: {rounds} rounds of {DECODE_TOKENS} tokens\n{describe_setup()}")
    with Processes(ONE_THREAD) as processes:
        chains = start_chains(processes, model, COUNTS)
        echo_address = processes.start("the echo", "bench", "echo-peer").wait_ready(time.monotonic() + 60)
        figures, echoes_s = asyncio.run(_measure(model, chains, echo_address.addr, rounds))
    _print_hops(console, figures, echoes_s)
    _print_span_overhead(console, measure_span_overhead(load_span(open_checkpoint(model), 0, 4)))


async def _measure(model: Path, chains: list[Chain], echo: str, rounds: int) -> tuple[HopFigures, list[float]]:
    checkpoint = open_checkpoint(model)
    served = ServedModel.of(checkpoint)
    ends = Ends.of(checkpoint)
    figures = HopFigures({count: [] for count in COUNTS}, {count: [] for count in COUNTS})
    async with AsyncExitStack() as stack:
        swarms: dict[int, Swarm] = {}
        for chain in chains:
            transport = await stack.enter_async_context(open_transport(client_network()))
            swarms[chain.num_servers] = await stack.enter_async_context(
                join_swarm(transport, [chain.address], ClientConfig())
            )
        echoes_s: list[float] = []
        for number in in_rounds(range(rounds + 1)):
            for count, swarm in swarms.items():
                step_s, overhead_s = await _one_run(swarm, served, ends, count)
                if number:  # the first round warms everything up
                    figures.steps_s[count].append(step_s)
                    figures.overheads_s[count].append(overhead_s)
            echoes_s.append(await measure_echo(swarms[1].transport, echo))
    return figures, echoes_s


async def _one_run(swarm: Swarm, model: ServedModel, ends: Ends, count: int) -> tuple[float, float]:
    """(step, overhead): medians over the decode steps of one session."""
    steps_s: list[float] = []
    overheads_s: list[float] = []
    with torch.inference_mode():
        async with swarm.open_session(model, max_tokens=PROMPT_TOKENS + DECODE_TOKENS + 1) as session:
            assert len(session.route) == count, f"expected a chain of {count} servers, got {session.route}"
            token_ids = torch.arange(3, 3 + PROMPT_TOKENS)[None]
            for number in range(DECODE_TOKENS + 1):
                began = time.perf_counter()
                hidden = to_wire(ends.head(token_ids))
                sent = time.perf_counter()
                output = await session.step(hidden, num_tokens=token_ids.shape[1], want="last")
                received = time.perf_counter()
                assert output is not None
                token_ids = ends.tail(to_torch(output))[None]
                if number:
                    compute_s = sum(timing.compute_s for timing in session.timings)
                    steps_s.append(time.perf_counter() - began)
                    overheads_s.append(received - sent - compute_s)
    return statistics.median(steps_s), statistics.median(overheads_s)


def _print_hops(console: Console, figures: HopFigures, echoes_s: list[float]) -> None:
    table = Table("servers", "step, ms", "overhead, ms", "overhead per hop, ms", box=None, header_style="bold")
    for count in COUNTS:
        overheads = [1000 * overhead for overhead in figures.overheads_s[count]]
        table.add_row(
            str(count),
            spread([1000 * step for step in figures.steps_s[count]]),
            spread(overheads),
            spread([overhead / count for overhead in overheads]),
        )
    console.print(table)
    console.print(f"one more server costs {spread([1000 * slope for slope in figures.slopes_s], ' ms')}: aim ≤ 0.70 ms")
    console.print(f"an echo of 2 KB through the same streams: {spread([1000 * echo for echo in echoes_s], ' ms')}")


def _print_span_overhead(console: Console, cost: SpanOverhead) -> None:
    console.print(
        f"the skeleton costs {1000 * cost.overhead_s:.2f} ms per span of {cost.num_blocks} blocks over calling the "
        f"same blocks directly ({1000 * cost.skeleton_s:.2f} against {1000 * cost.direct_s:.2f} ms)"
    )
    if cost.taped_overhead_s is not None:
        console.print(
            f"from a tape, as servers run them, the span takes {1000 * cost.taped_overhead_s:+.2f} ms beside that"
        )
