"""What every benchmark shares: the model S, server processes of its spans, and a printed setup."""

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import click

from corolla.apps.cli.progress import progress
from corolla.apps.processes import Processes
from corolla.models.disk_cache import user_cache

READY_TIMEOUT_S = 180.0
RECORDS_S = 6.0
"""After it is ready a server records its tapes in the first pause, which takes two seconds of a slow core."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""One compute thread per process: two threads on two busy cores are many times slower."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Servers that together host all blocks of S, in a swarm of their own."""

    num_servers: int
    address: str


def model_s() -> Path:
    """The checkpoint of S (random Llama: hidden 512, 8 blocks, fp32), written once into the user's cache."""
    directory = user_cache() / "bench" / "model-s"
    if not (directory / "config.json").exists():
        with progress("writing the random model S"):
            from corolla.models.testing import write_model_s

            partial = directory.with_name(f"model-s.{os.getpid()}")
            write_model_s(partial)
            partial.rename(directory)
    return directory


def start_chains(
    processes: Processes, model: Path, counts: Sequence[int], num_blocks: int = 8, *, let_record: bool = True
) -> list[Chain]:
    """For each count, a swarm of that many servers with equal spans; all ready when this returns.

    `let_record`: and done with what they do after that, which would slow what is measured.
    """
    with progress("starting the servers"):
        chains = _started(processes, model, counts, num_blocks)
        if let_record:
            time.sleep(RECORDS_S)
    return chains


def in_rounds(numbers: range, what: str = "round") -> Iterator[int]:
    """These numbers, each said on standard error when its round begins.

    In a line of its own between two rounds: a spinner would take part in what is measured.
    """
    for number in numbers:
        click.echo(f"{what} {number} of {numbers[-1]} …", err=True)
        yield number


def _started(processes: Processes, model: Path, counts: Sequence[int], num_blocks: int) -> list[Chain]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    chains: list[Chain] = []
    for count in counts:
        cuts = [num_blocks * edge // count for edge in range(count + 1)]
        spans = [f"{start}:{end}" for start, end in pairwise(cuts)]
        first = processes.start(f"server {spans[0]}", "serve", str(model), "--blocks", spans[0])
        address = first.wait_ready(deadline).addr
        others = [
            processes.start(f"server {span}", "serve", str(model), "--blocks", span, "--join", address)
            for span in spans[1:]
        ]
        for other in others:
            other.wait_ready(deadline)
        chains.append(Chain(count, address))
    return chains


def describe_setup() -> str:
    """The machine and the versions that the figures belong to."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hivemind"))
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{packages}; one compute thread per process, everything on this machine over loopback"
    )


def spread(values: Sequence[float], unit: str = "") -> str:
    """`median (least to most)`."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"
