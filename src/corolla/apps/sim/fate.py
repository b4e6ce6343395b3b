"""What befalls the servers of a random life: they die, freeze, are cut off, slow down, leave, move and join."""

import asyncio
import logging
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan
from corolla.clock import loop_time
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.transport import identity_of
from corolla.server.config import SessionLimits

log = logging.getLogger(__name__)

MOVES: Final = 0.08
"""Of the troubles, those that are a server's move to other blocks."""
MOVE_TIMEOUT_S: Final = 60.0


class Fate:
    """One life's. Everything follows from `rng`."""

    def __init__(
        self, swarm: MemorySwarm, rng: random.Random, tell: Callable[[str], None], *, clients: list[str],
        new_span: Callable[[int, int], ToySpan], limits: SessionLimits, cache_tokens: int,
    ) -> None:  # fmt: skip
        self._swarm = swarm
        self._rng = rng
        self._tell_life = tell
        self._clients = clients
        self._new_span = new_span
        self._limits = limits
        self._cache_tokens = cache_tokens
        self._spans: dict[str, str] = {}
        self._left: list[str] = []
        self._number = 0

    @property
    def in_order(self) -> list[str]:
        """Servers that serve, and those that left as they should: a killed one's memory is nobody's any more."""
        living = self._swarm.network.living
        return [name for name in self._spans if self._peer(name) in living] + self._left

    async def serve_all_blocks(self) -> None:
        end = self._swarm.model.num_blocks
        edges = sorted({0, end, *(self._rng.randint(1, end - 1) for _ in range(self._rng.randint(0, 3)))})
        for start, end in pairwise(edges):
            await self._serve(f"{start}:{end}")

    async def make_trouble(self) -> None:
        """One thing after another, for ever."""
        troubles = (self._kill, self._kill, self._freeze, self._cut, self._slow, self._leave)
        while True:
            await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1, 0.5)) * self._rng.random() * 2)
            await (self._move if self._rng.random() < MOVES else self._rng.choice(troubles))()

    async def calm_down(self) -> None:
        """Thaw and heal everything: what is left then is left for good. The last word of the dead arrives, too."""
        network = self._swarm.network
        peers = [self._peer(name) for name in (*self._clients, *(f"s{n}" for n in range(self._number)))]
        for peer in peers:
            network.thaw(peer)
        network.heal(peers, peers)

    async def _serve(self, span: str) -> None:
        name = f"s{self._number}"
        self._number += 1
        self._tell(f"{name} joins with {span}")
        await self._swarm.serve(
            name, span, runner=self._runner(span), limits=self._limits, cache_tokens=self._cache_tokens
        )
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
        self._left.append(name)
        await self._replace(span)

    async def _move(self) -> None:
        """As `server/moving.py` does. It takes another's place, who is killed, or there would be ever more of them."""
        if len(self._spans) < 2 or (taken := self._take_one()) is None:
            return
        name, span = taken
        other = self._rng.choice(list(self._spans))
        to = self._spans.pop(other)
        self._spans[name] = to
        goes_first = self._rng.random() < 0.5
        self._tell(f"{name} moves from {span} to {to}{', which it has to load yet' if goes_first else ''}")
        await self._swarm.move(name, self._runner(to), timeout_s=MOVE_TIMEOUT_S, leaves_first=goes_first)
        self._tell(f"{other} is killed")
        self._swarm.network.kill(self._peer(other))
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
        one, other = self._rng.sample([*self._clients, *self._spans], 2)
        return self._peer(one), self._peer(other)

    def _take_one(self) -> tuple[str, str] | None:
        """Somebody to lose. Now and then a block goes uncovered until the next one joins; not all the time, or the
        dead whose records live on would outnumber the living."""
        name = self._rng.choice(list(self._spans))
        others = [span for other, span in self._spans.items() if other != name]
        covered = {block for span in others for block in range(*map(int, span.split(":")))}
        if len(covered) < self._swarm.model.num_blocks and self._rng.random() < 0.8:
            return None
        return name, self._spans.pop(name)

    def _runner(self, span: str) -> ToySpan:
        return self._new_span(*map(int, span.split(":")))

    def _peer(self, name: str) -> PeerId:
        return identity_of(name).peer

    def _tell(self, event: str) -> None:
        self._tell_life(f"{loop_time():9.3f} s  {event}")
        log.info(event)
