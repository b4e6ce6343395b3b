"""Random lives of a swarm: servers killed, frozen, cut off, slowed, leaving, moving and joining, while text is written.

Everything follows from the seed: what befalls the servers (`fate.py`), what is written (`writing.py`), and what kind
of life it is. Some models cannot be trimmed, or take a prompt only in one piece; in some lives frames come twice or
late (`repeats.py`), servers drop idle sessions soon, or cache is short and sessions wait in line for it.

The span is a hash of the whole history (`toy.py`), so a step that is lost, done twice, out of order or on the wrong
cache changes every number after it. After each life nothing may be left: no session, lease, journal, task or stream.

    python -m corolla.apps.sim.chaos SEED [SEED …]     replay these lives, telling what happens
    python -m corolla.apps.sim.chaos --count 1000      that many lives from seed 0 on
"""

import argparse
import asyncio
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from corolla.apps.sim.fate import Fate
from corolla.apps.sim.repeats import frames_come_again
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan
from corolla.apps.sim.writing import Manners, Writer
from corolla.client.config import ClientConfig
from corolla.client.hop import AWAIT_SIGN_S
from corolla.client.swarm import Swarm
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits

NUM_BLOCKS: Final = 6
CONFIG: Final = ClientConfig(wait_for_servers_s=300.0, step_timeout_s=240.0, shun_s=20.0)
LIVES_PER_REPEATED: Final = 2
SETTLE_S: Final = 10.0
"""Long enough after a life for the silent to be found dead."""
PART_S: Final = 8.0
"""Long enough for the news that a stream has ended to arrive, over the slowest of links too."""
ROOMY_TOKENS: Final = 4096
TIGHT_TOKENS: Final = (640, 1280)
"""Cache for one session, or for two."""
IDLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What sort of life it is."""

    latency_s: float
    num_writers: int
    can_trim: bool = True
    prefill_in_chunks: bool = True
    expires: bool = False
    """Servers soon drop sessions that rest."""
    is_tight: bool = False
    """Every writer is a client of its own, and there is not always cache for all."""
    cache_tokens: int = ROOMY_TOKENS

    @property
    def manners(self) -> Manners:
        return Manners(
            num_runs=(2, 6) if self.is_tight or self.expires else (3, 8),
            cancelled=0.3 if self.is_tight else 0.08,
            rest_s=(0.8 * IDLE_S, 2 * IDLE_S) if self.expires else None,
            prefill_in_chunks=self.prefill_in_chunks,
            may_be_refused=self.is_tight,
        )

    @property
    def limits(self) -> SessionLimits:
        return SessionLimits(idle_timeout_s=IDLE_S) if self.expires else SessionLimits()

    @property
    def config(self) -> ClientConfig:
        return replace(CONFIG, wait_for_servers_s=10.0) if self.is_tight else CONFIG


@dataclass(slots=True)
class Life:
    """What one seed amounted to."""

    seed: int
    kind: Kind
    steps: int = 0
    recoveries: int = 0
    repeats: int = 0
    """Frames that were sent again."""
    cancelled: int = 0
    """Runs that were given up before they were over."""
    refused: int = 0
    """Runs for which there was no cache."""
    events: list[str] = field(default_factory=list[str])


def kind_of(rng: random.Random) -> Kind:
    """Most lives are plain ones: what is rare here happens a thousand times in ten thousand lives."""
    latency_s, num_writers = rng.choice((0.001, 0.03, 0.15)), rng.randint(1, 2)
    can_trim, in_chunks = rng.choice((*[(True, True)] * 6, (False, True), (False, False)))
    expires = rng.random() < 0.12
    if rng.random() > 0.08:
        return Kind(latency_s, num_writers, can_trim, in_chunks, expires)
    return Kind(latency_s, 3, can_trim, in_chunks, is_tight=True, cache_tokens=rng.choice(TIGHT_TOKENS))


def live(seed: int) -> Life:
    """One life on a virtual clock. Raises WrongText, or whatever went wrong, with the command that replays it."""
    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
    life = Life(seed, kind_of(rng))
    try:
        if seed % LIVES_PER_REPEATED == 0:
            with frames_come_again(random.Random(seed)) as repeats:  # noqa: S311 - reproducible on purpose
                run_virtual(_story(life, rng), limit_s=36_000)
            life.repeats = repeats.count
        else:
            run_virtual(_story(life, rng), limit_s=36_000)
    except BaseException as failure:
        failure.add_note(f"replay: python -m corolla.apps.sim.chaos {seed}")
        raise
    return life


async def _story(life: Life, rng: random.Random) -> None:
    kind = life.kind
    async with MemorySwarm(
        num_blocks=NUM_BLOCKS, seed=life.seed, conditions=LinkConditions(kind.latency_s, jitter_s=kind.latency_s)
    ) as swarm:
        names = [f"client {number}" for number in range(kind.num_writers if kind.is_tight else 1)]
        fate = Fate(
            swarm, rng, life.events.append, clients=names, limits=kind.limits, cache_tokens=kind.cache_tokens,
            new_span=partial(ToySpan, can_trim=kind.can_trim, prefill_in_chunks=kind.prefill_in_chunks),
        )  # fmt: skip
        for _ in range(2):  # two covers, so that one server's end is never the end of a block
            await fate.serve_all_blocks()
        clients = [await swarm.client(name, kind.config) for name in names]
        writers = [Writer(clients[n % len(clients)], swarm, rng, kind.manners) for n in range(kind.num_writers)]
        async with asyncio.TaskGroup() as group:
            troubles = [group.create_task(fate.make_trouble()) for _ in range(2)]
            await asyncio.gather(*(group.create_task(writer.write()) for writer in writers))
            for trouble in troubles:
                trouble.cancel()
        for writer in writers:
            life.steps += writer.runs
            life.recoveries += writer.recoveries
            life.cancelled += writer.cancelled
            life.refused += writer.refused
        await fate.calm_down()
        await _assert_nothing_is_left(swarm, fate.in_order, clients)


async def _assert_nothing_is_left(swarm: MemorySwarm, servers: Sequence[str], clients: Sequence[Swarm]) -> None:
    """`servers`: those that serve, and those that left in order."""
    for client in clients:
        assert client.journals.claimed_bytes == 0, "a client still keeps a journal"
    await asyncio.sleep(SETTLE_S)
    for name in servers:
        handler = swarm.handlers[name]
        assert not handler.sessions, f"{name} still holds a session"
        assert handler.pool.free_pages == handler.pool.total_pages, f"{name} still holds a lease"
        assert handler.bytes_in_flight == 0, f"{name} still counts steps"
        assert handler.journals.total_bytes == 0, f"{name} still keeps a journal"
        assert handler.admission.leased_tokens.total == 0, f"{name} still counts a session's cache"
    for client in clients:
        await client.close()
    await asyncio.sleep(PART_S)
    peers = [swarm.handlers[name].transport.peer for name in servers] + [client.own_peer for client in clients]
    if any(peer in swarm.network.living and swarm.network.living[peer].num_streams for peer in peers):
        await asyncio.sleep(AWAIT_SIGN_S)  # a client still listens to a server that it called dead
    for peer in peers:
        transport = swarm.network.living.get(peer)  # who left has none
        assert transport is None or transport.num_streams == 0, f"{peer} still has {transport.num_streams} streams"


def main() -> None:
    """Replay single lives, or run many and say how many went well."""
    parser = argparse.ArgumentParser(description="Random lives of an in-memory swarm.")
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--count", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.seeds:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    began, steps, recoveries = time.perf_counter(), 0, 0
    seeds = arguments.seeds or range(arguments.count)
    for seed in seeds:
        life = live(seed)
        steps, recoveries = steps + life.steps, recoveries + life.recoveries
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{len(seeds)} lives, {steps} runs, {recoveries} recoveries, all text right, {seconds:.1f} s\n")


if __name__ == "__main__":
    main()
