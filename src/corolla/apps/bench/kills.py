"""One long text while servers are killed at random, one after another: no token may differ, no step may hang.

First in memory, the real client and servers on a virtual clock with toy spans, a thousand kills; then with real
processes and real blocks, as many as their starts allow.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.fleet import Fleet, kill_family
from corolla.apps.bench.generation import generate, prompt_of
from corolla.apps.bench.setup import ONE_THREAD, describe_setup, model_s, spread
from corolla.apps.processes import Processes
from corolla.apps.sim.long_run import LongRun, live_long
from corolla.net.memory.loop import run_virtual

SEED: Final = 1
SPANS: Final = ("0:4", "4:8")
PROMPT_TOKENS: Final = 16
TOKENS_PER_KILL: Final = 12
MAX_TOKENS: Final = 2000


@dataclass(frozen=True, slots=True)
class RealRun:
    """A text of real blocks and what was killed under it."""

    kills: int
    steps_s: list[float]
    num_differing: int


def run(num_in_memory: int, num_real: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    console.print(f"corolla bench kills\n{describe_setup()}")
    if num_in_memory:
        began = time.perf_counter()
        _print_in_memory(console, run_virtual(live_long(SEED, num_in_memory)), time.perf_counter() - began)
    if num_real:
        torch.set_num_threads(1)
        _print_real(console, _run_real(model_s(), num_real))


def _run_real(model: Path, num_kills: int) -> RealRun:
    """One generation; the next server dies as soon as every span has two again."""
    num_tokens = min(TOKENS_PER_KILL * (num_kills + 1), MAX_TOKENS)
    rng = random.Random(SEED)  # noqa: S311 - reproducible on purpose
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = generate(plain, prompt_of(PROMPT_TOKENS), num_tokens)
    with Processes(ONE_THREAD) as processes:
        fleet = Fleet(processes, model, SPANS)
        fleet.launch()
        fleet.gather()
        swarm = AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=[fleet.address])
        waited_s = [0.0] * num_tokens
        with swarm.inference_session(max_length=PROMPT_TOKENS + num_tokens) as session:

            def strike(number: int) -> None:
                if number % TOKENS_PER_KILL == 0 and number < num_tokens:
                    began = time.perf_counter()
                    fleet.gather()  # our own wait for processes to start is no step's
                    waited_s[number - 1] = time.perf_counter() - began
                    fleet.strike(kill_family, [rng.choice(session.route).peer_id])
                    fleet.replace_lost()

            generation = generate(swarm, prompt_of(PROMPT_TOKENS), num_tokens, on_token=strike)
        swarm.close()
        kills = len(fleet.lost)
    differing = int((generation.tokens != expected.tokens).sum())
    steps_s = [step_s - pause_s for step_s, pause_s in zip(generation.steps_s, waited_s, strict=False)]
    return RealRun(kills, steps_s, differing)


def _print_in_memory(console: Console, run: LongRun, seconds: float) -> None:
    longest = max(run.steps_s)
    console.print(
        f"in memory, toy spans: {run.kills} kills ({run.kills_in_use} of servers in use, {run.recoveries} changes of "
        f"route) in {len(run.steps_s)} tokens: {run.num_differing} differ, {run.hangs} hang; longest step "
        f"{longest:.2f} s of virtual time; took {seconds:.0f} s. Aim: 0 and 0."
    )


def _print_real(console: Console, run: RealRun) -> None:
    console.print(
        f"processes, S: {run.kills} kills of a server in use in {len(run.steps_s) + 1} tokens: {run.num_differing} "
        f"differ; steps {spread([1000 * step_s for step_s in run.steps_s], ' ms')}. Aim: 0."
    )
