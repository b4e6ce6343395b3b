"""What one flooding client does to another's steps: a server of S, a client that decodes, and another that floods.

    python benchmarks/flood.py [SECONDS]

Each flood is a process of its own and takes all that the server gives it, for so many seconds (10), with as long a
pause before it; measuring begins a few seconds after it, when a flood that is cut off has been. Printed is the client's
mean step before and during it: all of it, and what the server alone took (waiting and computing).

And the processor's time: what the server and its libp2p daemon spent on the flood, in seconds a second (what they took
during it, less what as many of the client's steps took before it), and what the flooder and its daemon took. The first
is what the server is made to do; where cores are few, the second slows the client's steps too, and is not its doing.

A flooder is another machine: here it and its libp2p daemon have the last core to themselves, and the server, its
daemon and the decoding client share the others, before and during the flood. What a busy core beside them costs already
is the first line, and no flood's doing. (On one core, or where processes cannot
be kept to some, everybody shares, and the flooder also takes the client's compute.)
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from corolla.apps.bench.setup import ONE_THREAD, describe_setup, model_s, start_chains
from corolla.apps.processes import Processes
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.session import Session
from corolla.client.swarm import Swarm, join_swarm
from corolla.errors import SwarmError
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.tensors import to_wire
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

HIDDEN: Final = 512
SESSION_TOKENS: Final = 500
LONG_PROMPT: Final = 2048

SETTLES_S: Final = 4.0

done: Final = Counter[str]()
"""Of a flooding process: steps, sessions, streams."""

Flood = Callable[[Swarm, ServedModel], Coroutine[Any, Any, None]]


async def flood_nothing(swarm: Swarm, model: ServedModel) -> None:
    """No flood: a core that is busy beside the others, which slows them too where they share caches and a clock."""
    while True:
        done["sum"] += sum(range(10_000)) > 0
        await asyncio.sleep(0)


async def flood_decodes(swarm: Swarm, model: ServedModel) -> None:
    """Sixty sessions, each asking for the next token at once."""

    async def decode() -> None:
        while True:
            async with swarm.open_session(model, max_tokens=SESSION_TOKENS) as session:
                for _ in range(SESSION_TOKENS):
                    await step(session, 1)

    await insist(60, decode)


async def flood_prompts(swarm: Swarm, model: ServedModel) -> None:
    """Eight sessions, each sending a long prompt again and again."""

    async def prompt() -> None:
        async with swarm.open_session(model, max_tokens=LONG_PROMPT) as session:
            while True:
                session.trim(0)
                await step(session, LONG_PROMPT)

    await insist(8, prompt)


async def flood_opens(swarm: Swarm, model: ServedModel) -> None:
    """Sessions opened and closed as fast as they are granted."""

    async def open_and_close() -> None:
        while True:
            async with swarm.open_session(model, max_tokens=16):
                done["session"] += 1

    await insist(16, open_and_close)


async def flood_junk(swarm: Swarm, model: ServedModel) -> None:
    """Streams of both protocols with a megabyte of noise each."""
    [server] = (await swarm.router(model).refresh()).servers
    noise = random.Random(0).randbytes(1 << 20)  # noqa: S311 - reproducible on purpose

    async def throw() -> None:
        while True:
            for protocol in (CONTROL_PROTOCOL, DATA_PROTOCOL):
                stream = await swarm.transport.dial(server, protocol, timeout_s=5)
                stream.start(lambda _bytes: None, lambda _error: None)
                stream.write([noise])
                done["stream"] += 1
                await asyncio.sleep(0.01)
                stream.close()

    await insist(8, throw)


FLOODS: Final[dict[str, Flood]] = {
    "nothing": flood_nothing, "decodes": flood_decodes, "prompts": flood_prompts,
    "opens": flood_opens, "junk": flood_junk,
}  # fmt: skip


async def insist(times: int, work: Callable[[], Awaitable[None]]) -> None:
    """So many at once; what is refused is tried again, a moment later."""

    async def insistently() -> None:
        while True:
            try:
                await work()
            except SwarmError:
                await asyncio.sleep(0.02)

    await asyncio.gather(*(insistently() for _ in range(times)))


async def step(session: Session, num_tokens: int) -> None:
    hidden = to_wire(torch.full((1, num_tokens, HIDDEN), 0.01))
    await session.step(hidden, num_tokens=num_tokens, want="last")
    done["step"] += 1


async def run_flood(kind: str, address: str) -> None:
    async with open_transport(NetworkConfig(is_client=True)) as transport, join_swarm(transport, [address]) as swarm:
        print(0, flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tell())
            tasks.create_task(FLOODS[kind](swarm, served_model()))


async def tell() -> None:
    """How much has been done, each second."""
    while True:
        await asyncio.sleep(1)
        print(done.total(), flush=True)


async def measure(swarm: Swarm, seconds: float) -> tuple[list[float], list[float]]:
    """(whole steps, the server's part of each) of one decoding session, in seconds."""
    whole: list[float] = []
    server: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        async with swarm.open_session(served_model(), max_tokens=SESSION_TOKENS) as session:
            for _ in range(SESSION_TOKENS):
                began = time.perf_counter()
                await step(session, 1)
                whole.append(time.perf_counter() - began)
                server.append(sum(timing.queue_s + timing.compute_s for timing in session.timings))
                if time.monotonic() >= until:
                    break
    return whole, server


async def compare(address: str, seconds: float) -> None:
    transport = open_transport(NetworkConfig(is_client=True))
    async with transport as opened, join_swarm(opened, [address], ClientConfig(step_timeout_s=60)) as swarm:
        await measure(swarm, 2)
        for kind in FLOODS:
            quiet = Spent(seconds)
            before = await measure(swarm, seconds)
            quiet.stop()
            async with flooded(kind, address) as counts:
                await measure(swarm, SETTLES_S)
                busy = Spent(seconds)
                during = await measure(swarm, seconds)
                busy.stop()
            print(f"{kind:8} {told(before[0], during[0])}   at the server {told(before[1], during[1])}", flush=True)
            print(
                f"         it got {max(counts) / (seconds + SETTLES_S):.1f} steps, sessions, streams or sums a second\n"
                f"         processor seconds a second: {busy.beyond(quiet, len(during[0]) / len(before[0]))}",
                flush=True,
            )


class Spent:
    """Processor seconds a second of the server, its daemon, and the flooder with its own, until `stop`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        ours = [process for process in psutil.Process().children() if "python" in process.name()]
        server, *flooders = sorted(ours, key=lambda process: process.create_time())
        floods = [one for flooder in flooders for one in (flooder, *flooder.children(recursive=True))]
        self._groups = {"the server": [server], "its daemon": server.children(recursive=True), "the flooder": floods}
        self._at_first = self._read()
        self.rates: dict[str, float] = {}

    def stop(self) -> None:
        now = self._read()
        self.rates = {who: (now[who] - self._at_first[who]) / self._seconds for who in now}

    def beyond(self, quiet: "Spent", share: float) -> str:
        """What is more than `share` of what was spent in quiet: as many steps as were taken in both."""
        return ", ".join(f"{who} {rate - share * quiet.rates[who]:.3f}" for who, rate in self.rates.items())

    def _read(self) -> dict[str, float]:
        return {who: sum(map(_cpu_s, group)) for who, group in self._groups.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@asynccontextmanager
async def flooded(kind: str, address: str) -> AsyncIterator[list[int]]:
    """Another process floods inside the block; how much it had done after each second."""
    counts: list[int] = []
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--flood", kind, address,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **ONE_THREAD},
    )  # fmt: skip
    try:
        keep_to(CORES[-1:], process.pid)
        assert process.stdout is not None
        counts.append(int(await process.stdout.readline()))
        yield counts
    finally:
        if process.returncode is not None:
            raise SystemExit("the flooding client has ended by itself")
        process.kill()
        rest, _ = await process.communicate()
        counts += map(int, rest.split())


def told(before: list[float], during: list[float]) -> str:
    first, second = statistics.mean(before), statistics.mean(during)
    return (
        f"{1000 * first:6.2f} ms → {1000 * second:7.2f} ms (×{second / first:.2f}; median "
        f"×{statistics.median(during) / statistics.median(before):.2f}, longest {1000 * max(during):.0f} ms)"
    )


def served_model() -> ServedModel:
    return MODEL


CORES: Final = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_to(cores: list[int], process: int = 0) -> None:
    """A process (this one), and all that it starts from now on."""
    if len(CORES) > 1:
        os.sched_setaffinity(process, cores)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    if arguments[:1] == ["--flood"]:
        asyncio.run(run_flood(arguments[1], arguments[2]))
        return
    keep_to(CORES[:-1])
    print(f"one flooding client beside a decoding one, on a server of S\n{describe_setup()}")
    with Processes(ONE_THREAD) as processes:
        [chain] = start_chains(processes, Path(model_s()), [1])
        asyncio.run(compare(chain.address, float(arguments[0]) if arguments else 10.0))


if __name__ == "__main__":
    checkpoint = open_checkpoint(model_s())
    MODEL: Final = ServedModel(checkpoint.name, fingerprint(checkpoint), checkpoint.num_blocks)
    main(sys.argv[1:])
