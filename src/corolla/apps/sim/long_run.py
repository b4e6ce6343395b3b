"""One long text on a virtual clock, while servers are killed at random moments and others join in their place.

    run_virtual(live_long(seed, num_kills))

Every span has two servers; the next is killed once the one before has been replaced, wherever the text is by then: in
a step, between two, in the middle of a recovery.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.net.memory.links import LinkConditions
from corolla.server.config import SessionLimits

NUM_BLOCKS = 6
SPANS = ("0:2", "2:4", "4:6")
TOKENS_PER_KILL = 6
"""Room for this many; how many there are chance says."""
CACHE_SHARE = 4
"""One client may lease only a part of a server's cache."""
MAX_PAUSE_S = 0.3
LATENCY_S = 0.005
STEP_LIMIT_S = 60.0
"""A step that takes longer hangs."""


@dataclass(slots=True)
class LongRun:
    """What came of it; times are virtual."""

    kills: int = 0
    kills_in_use: int = 0
    """Of servers that the text was using at that moment."""
    recoveries: int = 0
    num_differing: int = 0
    steps_s: list[float] = field(default_factory=list[float])

    @property
    def hangs(self) -> int:
        return sum(step_s > STEP_LIMIT_S for step_s in self.steps_s)


async def live_long(seed: int, num_kills: int) -> LongRun:
    """Write until that many servers have been killed, and compare every output."""
    run, rng = LongRun(), random.Random(seed)  # noqa: S311 - reproducible on purpose
    max_tokens = TOKENS_PER_KILL * num_kills + 100
    conditions = LinkConditions(LATENCY_S, jitter_s=LATENCY_S)
    async with MemorySwarm(num_blocks=NUM_BLOCKS, seed=seed, conditions=conditions) as swarm:
        killer = _Killer(swarm, rng, run, SessionLimits(max_session_tokens=max_tokens), CACHE_SHARE * max_tokens)
        await killer.begin()
        client = await swarm.client("client", ClientConfig())
        async with client.open_session(swarm.model, max_tokens=max_tokens) as session:
            async with asyncio.TaskGroup() as group:
                killing = group.create_task(killer.kill_all(session, num_kills))
                writing = group.create_task(_write(session, rng, run, killing, max_tokens))
            run.recoveries = session.recoveries
    inputs, outputs = writing.result()
    run.num_differing = sum(mine != right for mine, right in zip(outputs, whole_model(NUM_BLOCKS, inputs), strict=True))
    return run


async def _write(
    session: Session, rng: random.Random, run: LongRun, killing: "asyncio.Task[None]", max_tokens: int
) -> tuple[Sequence[int], Sequence[int]]:
    """One token after another for as long as there is killing; what went in, and what came out."""
    inputs: list[int] = []
    outputs: list[int] = []
    while not killing.done() and len(inputs) < max_tokens:
        inputs.append(rng.getrandbits(32))
        began = loop_time()
        output = await session.step(hidden_of([inputs[-1:]]), num_tokens=1, want="last")
        assert output is not None
        run.steps_s.append(loop_time() - began)
        outputs += numbers_of(output)
    assert killing.done(), f"the text ended at {max_tokens} tokens, after {run.kills} kills"
    return inputs, outputs


class _Killer:
    """Keeps every span at two servers, and kills one of them after another."""

    def __init__(
        self, swarm: MemorySwarm, rng: random.Random, run: LongRun, limits: SessionLimits, cache_tokens: int
    ) -> None:
        self._swarm = swarm
        self._rng = rng
        self._run = run
        self._limits = limits
        self._cache_tokens = cache_tokens
        self._spans: dict[str, str] = {}
        self._number = 0

    async def begin(self) -> None:
        for span in SPANS * 2:
            await self._serve(span)

    async def kill_all(self, session: Session, num_kills: int) -> None:
        for _ in range(num_kills):
            await asyncio.sleep(self._rng.random() * MAX_PAUSE_S)
            name = self._rng.choice(list(self._spans))
            peer = self._swarm.network.transport(name).peer
            self._run.kills += 1
            self._run.kills_in_use += any(hop.peer_id == peer for hop in session.route)
            self._swarm.network.kill(peer)
            await self._serve(self._spans.pop(name))

    async def _serve(self, span: str) -> None:
        name = f"s{self._number}"
        self._number += 1
        self._spans[name] = span
        await self._swarm.serve(name, span, limits=self._limits, cache_tokens=self._cache_tokens)
