"""Decoding and first tokens over a slow network: three servers, 50 ms between all hosts and back, 100 Mbit/s.

Each server and the client run on hosts of their own (`network.py`); plain transformers runs in the client's process,
turn by turn, because what this machine can compute changes from minute to minute.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.generation import generate, prompt_of
from corolla.apps.bench.network import NoSlowNetwork, SlowNetwork, slow_network
from corolla.apps.bench.setup import ONE_THREAD, READY_TIMEOUT_S, describe_setup, model_s, spread
from corolla.apps.processes import Processes
from corolla.client.model import DistributedModelForCausalLM
from corolla.errors import SwarmError
from corolla.wire.messages import HopTiming

SPANS: Final = ("0:3", "3:6", "6:8")
RTT_MS: Final = 50.0
MBIT: Final = 100.0
SHORT: Final = 16
LONG: Final = 512
NEW_TOKENS: Final = 32
ROUND_TIMEOUT_S: Final = 120.0
ONE_WAY_S: Final = RTT_MS / 2000
RING_S: Final = (len(SPANS) + 1) * ONE_WAY_S
"""No ring of three servers can decode a token faster than its four one-way trips."""


@dataclass(slots=True)
class Figures:
    """Seconds, one of each for every round."""

    step: list[float] = field(default_factory=list[float])
    plain_step: list[float] = field(default_factory=list[float])
    blocks: list[float] = field(default_factory=list[float])
    """Of a step: what the servers say that their blocks took, all together."""
    books: list[float] = field(default_factory=list[float])
    """Of a step: the steps' time inside the servers beside that, waiting in line and getting the result away."""
    first_on_open: list[float] = field(default_factory=list[float])
    first_on_new: list[float] = field(default_factory=list[float])
    plain_first: list[float] = field(default_factory=list[float])


def run(rounds: int) -> None:
    """Measure and print; on a machine that cannot make such a network, say why and measure nothing."""
    console = Console(highlight=False)
    console.print(f"corolla bench wan: {rounds} rounds; {RTT_MS:g} ms round trip, {MBIT:g} Mbit/s\n{describe_setup()}")
    model = model_s()
    try:
        with slow_network(len(SPANS) + 1, rtt_ms=RTT_MS, mbit=MBIT) as network, Processes(ONE_THREAD) as processes:
            address = start_servers(processes, network, model)
            _print(console, _client(network, model, address, rounds))
    except NoSlowNetwork as reason:
        console.print(f"skipped: {reason}")


def start_servers(processes: Processes, network: SlowNetwork, model: Path) -> str:
    """One server of each span on hosts 0, 1, 2; the address to join, once all are ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    address = ""
    for host, span in enumerate(SPANS):
        words = ["serve", str(model), "--blocks", span, "--listen", f"{network.address(host)}:0"]
        join = ["--join", address] if address else []
        server = processes.start(f"server {span}", *words, *join, within=network.within(host))
        address = server.wait_ready(deadline).addr
    return address


def _client(network: SlowNetwork, model: Path, address: str, rounds: int) -> Figures:
    """Run the measuring client on the last host."""
    words = ["-m", "corolla", "bench", "wan-client", str(model), address, "--rounds", str(rounds)]
    done = subprocess.run(  # noqa: S603 - our own program, no shell
        [*network.within(len(SPANS)), sys.executable, *words],
        stdout=subprocess.PIPE, timeout=ROUND_TIMEOUT_S * (rounds + 1), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SwarmError(f"the measuring client ended with status {done.returncode}")
    return Figures(**json.loads(done.stdout))


def measure(model: Path, address: str, rounds: int) -> str:
    """The client's part: the figures as JSON."""
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    swarm = AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=[address])
    figures = Figures()
    for number in range(rounds + 1):
        taken = Figures() if number == 0 else figures  # the first round warms everything up
        _decode(swarm, plain, taken)
        _first_tokens(swarm, plain, taken)
    swarm.close()
    return json.dumps(asdict(figures))


def _decode(swarm: DistributedModelForCausalLM, plain: torch.nn.Module, figures: Figures) -> None:
    steps: list[list[HopTiming]] = []
    with swarm.inference_session(max_length=SHORT + NEW_TOKENS) as session:
        by_swarm = generate(swarm, prompt_of(SHORT), NEW_TOKENS, on_token=lambda _: steps.append(session.timings))
    by_plain = generate(plain, prompt_of(SHORT), NEW_TOKENS)
    assert torch.equal(by_swarm.tokens, by_plain.tokens), "the swarm's tokens differ from the local model's"
    figures.step.append(by_swarm.step_s)
    figures.plain_step.append(by_plain.step_s)
    decoded = steps[1:]  # the first was the prompt
    figures.blocks.append(statistics.median(sum(hop.compute_s for hop in hops) for hops in decoded))
    figures.books.append(statistics.median(sum(hop.queue_s + hop.send_s for hop in hops) for hops in decoded))


def _first_tokens(swarm: DistributedModelForCausalLM, plain: torch.nn.Module, figures: Figures) -> None:
    prompt = prompt_of(LONG)
    with swarm.inference_session(max_length=LONG + SHORT + 4) as session:
        generate(swarm, prompt_of(SHORT), 1)
        assert len(session.route) == len(SPANS), f"expected a chain of {len(SPANS)} servers, got {session.route}"
        session.position = 0  # forget it: the prompt is the session's first, as it is on a new one
        session.output_ids = session.attention_mask = None
        on_open = generate(swarm, prompt, 1)
    on_new, by_plain = generate(swarm, prompt, 1), generate(plain, prompt, 1)
    assert torch.equal(on_open.tokens, by_plain.tokens)
    assert torch.equal(on_new.tokens, by_plain.tokens)
    figures.first_on_open.append(on_open.first_token_s)
    figures.first_on_new.append(on_new.first_token_s)
    figures.plain_first.append(by_plain.first_token_s)


def _print(console: Console, figures: Figures) -> None:
    table = Table("what", "swarm", "plain transformers", "aim", "others", box=None, header_style="bold")
    aims = [RING_S + 1.15 * plain + 0.005 for plain in figures.plain_step]
    table.add_row(
        f"decode, {len(SPANS)} servers",
        spread([1000 * step for step in figures.step], " ms"),
        spread([1000 * step for step in figures.plain_step], " ms"),
        f"≤ {1000 * statistics.median(aims):.0f} ms = {1000 * RING_S:.0f} + 1.15 × plain + 5",
        "207 ms (Petals), 199 ms (llama.cpp RPC)",
    )
    for name, taken, aim, others in (
        (f"first of {LONG}, open session", figures.first_on_open, "≤ 0.9 s", "–"),
        (
            f"first of {LONG}, new session",
            figures.first_on_new,
            "≤ 1.2 s",
            "2.1–2.6 s (Petals), 1.23 s (llama.cpp RPC)",
        ),
    ):
        table.add_row(name, spread(taken, " s"), spread(figures.plain_first, " s"), aim, others)
    console.print(table)
    over = [1000 * (step - aim) for step, aim in zip(figures.step, aims, strict=True)]
    console.print(f"decode less its aim, round by round: {spread(over, ' ms')}. Tokens equal in every round.")
    blocks, books = ([1000 * seconds for seconds in taken] for taken in (figures.blocks, figures.books))
    console.print(
        f"of a step: {1000 * RING_S:.0f} ms on the wire; by the servers' clocks blocks {spread(blocks, ' ms')} and "
        f"what is around them {spread(books, ' ms')}; the rest is the client with its head, the daemons and waking up"
    )
