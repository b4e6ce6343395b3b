"""Decode speed over two servers against plain transformers in this process, alternating run by run."""

import statistics

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.generation import generate, prompt_of
from corolla.apps.bench.setup import ONE_THREAD, describe_setup, in_rounds, model_s, spread, start_chains
from corolla.apps.processes import Processes

PROMPT_TOKENS = 16
NEW_TOKENS = 64


def run(rounds: int, num_servers: int = 2) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    directory = model_s()
    console.print(f"corolla bench decode: {rounds} rounds of {NEW_TOKENS} tokens, greedy\n{describe_setup()}")
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = prompt_of(PROMPT_TOKENS)
    with Processes(ONE_THREAD) as processes:
        address = start_chains(processes, directory, [num_servers])[0].address
        swarm = AutoDistributedModelForCausalLM.from_pretrained(directory, initial_peers=[address])
        swarm_s: list[float] = []
        plain_s: list[float] = []
        for number in in_rounds(range(rounds + 1)):
            by_swarm, by_plain = generate(swarm, prompt, NEW_TOKENS), generate(plain, prompt, NEW_TOKENS)
            assert torch.equal(by_swarm.tokens, by_plain.tokens), "the swarm's tokens differ from the local model's"
            if number:  # the first round warms everything up
                swarm_s.append(by_swarm.step_s)
                plain_s.append(by_plain.step_s)
        swarm.close()
    table = Table("", "ms per token", "tokens/s", box=None, header_style="bold")
    for name, steps_s in ((f"{num_servers} servers", swarm_s), ("plain transformers", plain_s)):
        table.add_row(name, spread([1000 * step for step in steps_s]), f"{1 / statistics.median(steps_s):.1f}")
    console.print(table)
    ratios = [plain / swarm for plain, swarm in zip(plain_s, swarm_s, strict=True)]
    console.print(f"rate kept, run by run: {spread(ratios)}: aim ≥ 0.85. Tokens equal in every run.")
