"""Decode speed over two servers against plain transformers in this process, alternating run by run."""

import statistics
import time
from itertools import pairwise
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.setup import ONE_THREAD, describe_setup, model_s, spread, start_chains
from corolla.apps.processes import Processes

PROMPT_TOKENS = 16
NEW_TOKENS = 64


class _Clock(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return

    @property
    def step_s(self) -> float:
        """Median seconds between tokens; the prompt and the first token are not counted."""
        tokens = self.times[1:]
        return statistics.median(after - before for before, after in pairwise(tokens))


def run(rounds: int, num_servers: int = 2) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    directory = model_s()
    console.print(f"corolla bench decode: {rounds} rounds of {NEW_TOKENS} tokens, greedy\n{describe_setup()}")
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with Processes(ONE_THREAD) as processes:
        address = start_chains(processes, directory, [num_servers])[0].address
        swarm = AutoDistributedModelForCausalLM.from_pretrained(directory, initial_peers=[address])
        swarm_s: list[float] = []
        plain_s: list[float] = []
        for number in range(rounds + 1):
            swarm_step, swarm_tokens = _generate(swarm)
            plain_step, plain_tokens = _generate(plain)
            assert torch.equal(swarm_tokens, plain_tokens), "the swarm's tokens differ from the local model's"
            if number:  # the first round warms everything up
                swarm_s.append(swarm_step)
                plain_s.append(plain_step)
        swarm.close()
    table = Table("", "ms per token", "tokens/s", box=None, header_style="bold")
    for name, steps_s in ((f"{num_servers} servers", swarm_s), ("plain transformers", plain_s)):
        table.add_row(name, spread([1000 * step for step in steps_s]), f"{1 / statistics.median(steps_s):.1f}")
    console.print(table)
    ratios = [plain / swarm for plain, swarm in zip(plain_s, swarm_s, strict=True)]
    console.print(f"rate kept, run by run: {spread(ratios)}: aim ≥ 0.85. Tokens equal in every run.")


def _generate(model: torch.nn.Module) -> tuple[float, torch.Tensor]:
    clock = _Clock()
    prompt = torch.arange(3, 3 + PROMPT_TOKENS)[None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = cast("Any", model).generate(prompt, streamer=clock, **options)
    return clock.step_s, tokens
