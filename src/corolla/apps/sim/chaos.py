"""Random lives of a swarm: servers killed, frozen, cut off, slowed, leaving and joining, while text is written.

In every fourth life frames come twice or late (`repeats.py`).

Everything follows from the seed. The span is a hash of the whole history (`toy.py`), so a step that is lost, done
twice, out of order or on the wrong cache changes every number after it. After each life nothing may be left: no
session, lease, task or stream.

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
from dataclasses import dataclass, field
from itertools import pairwise

from corolla.apps.sim.repeats import frames_come_again
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.session import Session, StepInput
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import HopFailed, NoRoute, Refused
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.transport import identity_of
from corolla.wire.tensors import WireTensor

log = logging.getLogger(__name__)

NUM_BLOCKS = 6
CONFIG = ClientConfig(wait_for_servers_s=300.0, step_timeout_s=240.0, shun_s=20.0)
LIVES_PER_REPEATED = 4
ANEW = 0.15
"""Of the runs, those that begin another session."""
SETTLE_S = 10.0
"""Long enough after a life for the silent to be found dead."""


class WrongText(AssertionError):
    """The swarm computed something else than one machine would."""


@dataclass(slots=True)
class Life:
    """What one seed amounted to."""

    seed: int
    steps: int = 0
    recoveries: int = 0
    repeats: int = 0
    """Frames that were sent again."""
    events: list[str] = field(default_factory=list[str])


def live(seed: int) -> Life:
    """One life on a virtual clock. Raises WrongText, or whatever went wrong, with the command that replays it."""
    life = Life(seed)
    try:
        if seed % LIVES_PER_REPEATED == 0:
            with frames_come_again(random.Random(seed)) as repeats:  # noqa: S311 - reproducible on purpose
                run_virtual(_story(life), limit_s=36_000)
            life.repeats = repeats.count
        else:
            run_virtual(_story(life), limit_s=36_000)
    except BaseException as failure:
        failure.add_note(f"replay: python -m corolla.apps.sim.chaos {seed}")
        raise
    return life


async def _story(life: Life) -> None:
    rng = random.Random(life.seed)  # noqa: S311 - reproducible on purpose
    latency_s = rng.choice((0.001, 0.03, 0.15))
    async with MemorySwarm(
        num_blocks=NUM_BLOCKS, seed=life.seed, conditions=LinkConditions(latency_s, jitter_s=latency_s)
    ) as swarm:
        fate = Fate(swarm, rng, life)
        for _ in range(2):  # two covers, so that one server's end is never the end of a block
            await fate.serve_all_blocks()
        client = await swarm.client("client", CONFIG)
        async with asyncio.TaskGroup() as group:
            troubles = [group.create_task(fate.make_trouble()) for _ in range(2)]
            writers = [group.create_task(_write(client, swarm, rng, life)) for _ in range(rng.randint(1, 2))]
            await asyncio.gather(*writers)
            for trouble in troubles:
                trouble.cancel()
        await fate.calm_down()
        await asyncio.sleep(SETTLE_S)
        for name, handler in swarm.handlers.items():
            if handler.transport.peer in swarm.network.living and fate.is_serving(name):
                assert not handler.sessions, f"{name} still holds a session"
                assert handler.pool.free_pages == handler.pool.total_pages, f"{name} still holds a lease"
                assert handler.bytes_in_flight == 0, f"{name} still counts steps"
                assert handler.journals.total_bytes == 0, f"{name} still keeps a journal"


async def _write(client: Swarm, swarm: MemorySwarm, rng: random.Random, life: Life) -> None:
    """Sessions one after another: prefills, single steps, trims and row gathers, each output compared."""
    rows: list[list[int]] = [[] for _ in range(rng.randint(1, 2))]
    session = await _start(client, swarm)
    try:
        for _ in range(rng.randint(4, 16)):
            if rng.random() < ANEW:
                life.recoveries += session.recoveries
                session.close()
                session, rows = await _begin(client, swarm, rng)
            else:
                rows = await _one_run(session, rng, rows)
            life.steps += 1
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, 2))
        life.recoveries += session.recoveries
    finally:
        session.close()


async def _start(client: Swarm, swarm: MemorySwarm) -> Session:
    """A new session waits for nobody: as a user would, try again while servers die under it."""
    deadline = loop_time() + CONFIG.wait_for_servers_s
    while True:
        try:
            return await client.start_session(swarm.model, max_tokens=200, max_rows=3)
        except (HopFailed, NoRoute, Refused):
            if loop_time() > deadline:
                raise
            await asyncio.sleep(1)


async def _begin(client: Swarm, swarm: MemorySwarm, rng: random.Random) -> tuple[Session, list[list[int]]]:
    """A session whose first steps go right behind `Open`, and what it holds then."""
    news = _news(rng, rng.randint(1, 2))
    inputs = [StepInput(hidden_of(new), len(new[0])) for new in news]
    deadline = loop_time() + CONFIG.wait_for_servers_s
    while True:
        session = client.new_session(swarm.model, max_tokens=200, max_rows=3)
        try:
            outputs = await session.begin(lambda: inputs, want="all")
        except (HopFailed, NoRoute, Refused):
            if not session.is_closed or loop_time() > deadline:
                raise
            await asyncio.sleep(1)
        except BaseException:
            session.close()
            raise
        else:
            return session, _checked(session, [[] for _ in news[0]], news, outputs)


async def _one_run(session: Session, rng: random.Random, rows: list[list[int]]) -> list[list[int]]:
    if rows[0] and rng.random() < 0.15:
        keep = rng.randint(1, len(rows[0]))
        session.trim(keep)
        rows = [row[:keep] for row in rows]
    if rows[0] and rng.random() < 0.15:
        order = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 3))]
        session.gather(order)
        rows = [list(rows[index]) for index in order]
    news = _news(rng, len(rows))
    outputs = await session.run([StepInput(hidden_of(new), len(new[0])) for new in news], want="all")
    return _checked(session, rows, news, outputs)


def _news(rng: random.Random, num_rows: int) -> list[list[list[int]]]:
    """The inputs of a run: for each step, for each row, its numbers."""
    chunks = [rng.choice((1, 1, 1, 3, 5)) for _ in range(rng.choice((1, 1, 1, 4)))]
    return [[[rng.getrandbits(32) for _ in range(size)] for _ in range(num_rows)] for size in chunks]


def _checked(
    session: Session, rows: list[list[int]], news: list[list[list[int]]], outputs: Sequence[WireTensor | None]
) -> list[list[int]]:
    """The rows with what is new, once the outputs are found to be right."""
    begin = len(rows[0])
    rows = [row + [number for new in news for number in new[index]] for index, row in enumerate(rows)]
    right = [whole_model(NUM_BLOCKS, row) for row in rows]
    for new, output in zip(news, outputs, strict=True):
        size = len(new[0])
        expected = [number for row in right for number in row[begin : begin + size]]
        begin += size
        if output is None or numbers_of(output) != expected:
            raise WrongText(f"wrong output at position {session.position}, {loop_time():.3f} s into the life")
    return rows


class Fate:
    """What befalls the swarm."""

    def __init__(self, swarm: MemorySwarm, rng: random.Random, life: Life) -> None:
        self._swarm = swarm
        self._rng = rng
        self._life = life
        self._spans: dict[str, str] = {}
        self._number = 0

    def is_serving(self, name: str) -> bool:
        return name in self._spans

    async def serve_all_blocks(self) -> None:
        edges = sorted({0, NUM_BLOCKS, *(self._rng.randint(1, NUM_BLOCKS - 1) for _ in range(self._rng.randint(0, 3)))})
        for start, end in pairwise(edges):
            await self._serve(f"{start}:{end}")

    async def make_trouble(self) -> None:
        """One thing after another, for ever."""
        troubles = (self._kill, self._kill, self._freeze, self._cut, self._slow, self._leave)
        while True:
            await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1, 0.5)) * self._rng.random() * 2)
            await self._rng.choice(troubles)()

    async def calm_down(self) -> None:
        """Thaw and heal everything: what is left then is left for good."""
        network = self._swarm.network
        peers = list(network.living)
        for peer in peers:
            network.thaw(peer)
        network.heal(peers, peers)

    async def _serve(self, span: str) -> None:
        name = f"s{self._number}"
        self._number += 1
        self._tell(f"{name} joins with {span}")
        await self._swarm.serve(name, span)
        self._spans[name] = span

    async def _kill(self) -> None:
        if (taken := self._take_one()) is None:
            return
        name, span = taken
        self._tell(f"{name} is killed")
        self._swarm.network.kill(self._peer(name))
        await self._replace(span)

    async def _leave(self) -> None:
        if (taken := self._take_one()) is None:
            return
        name, span = taken
        self._tell(f"{name} leaves")
        await self._swarm.leave(name)
        await self._replace(span)

    async def _replace(self, span: str) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.5, 8.0)) * self._rng.random())
        await self._serve(span)

    async def _freeze(self) -> None:
        name = self._rng.choice(list(self._spans))
        seconds = self._rng.choice((0.5, 5.0, 12.0)) * self._rng.random()
        self._tell(f"{name} freezes for {seconds:.2f} s")
        self._swarm.network.freeze(self._peer(name))
        await asyncio.sleep(seconds)
        self._swarm.network.thaw(self._peer(name))

    async def _cut(self) -> None:
        one, other = self._two_peers()
        one_way = self._rng.random() < 0.3
        seconds = self._rng.choice((0.5, 5.0, 12.0)) * self._rng.random()
        self._tell(f"a link is cut for {seconds:.2f} s{', one way' if one_way else ''}")
        self._swarm.network.partition([one], [other], one_way=one_way)
        await asyncio.sleep(seconds)
        self._swarm.network.heal([one], [other], one_way=one_way)

    async def _slow(self) -> None:
        one, other = self._two_peers()
        conditions = LinkConditions(
            latency_s=self._rng.choice((0.0, 0.02, 0.3)), jitter_s=self._rng.choice((0.0, 0.2)),
            bytes_per_s=self._rng.choice((1e4, 1e6)), loss=self._rng.choice((0.0, 0.2)),
        )  # fmt: skip
        self._tell(f"a link now has {conditions}")
        self._swarm.network.set_conditions(one, other, conditions)

    def _two_peers(self) -> tuple[PeerId, PeerId]:
        one, other = self._rng.sample(["client", *self._spans], 2)
        return self._peer(one), self._peer(other)

    def _take_one(self) -> tuple[str, str] | None:
        """Somebody to lose. Now and then a block goes uncovered until the next one joins; not all the time, or the
        dead whose records live on would outnumber the living."""
        name = self._rng.choice(list(self._spans))
        others = [span for other, span in self._spans.items() if other != name]
        covered = {block for span in others for block in range(*map(int, span.split(":")))}
        if len(covered) < NUM_BLOCKS and self._rng.random() < 0.8:
            return None
        return name, self._spans.pop(name)

    def _peer(self, name: str) -> PeerId:
        return identity_of(name).peer

    def _tell(self, event: str) -> None:
        self._life.events.append(f"{loop_time():9.3f} s  {event}")
        log.info(event)


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
