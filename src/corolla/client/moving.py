"""Leaves a server that still serves: make before break.

A substitute is built up beside the route while the old server works on, then takes its place between two steps; no
step waits for more than that. A trim, a row gather or another change of the route in between makes what the
substitute has heard worthless: then it begins again. When time runs out, the old server is lost like any other.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from corolla.client.hop import Hop
from corolla.client.recovery import Place
from corolla.client.ring import PlacesFailed, Ring, SwarmAccess
from corolla.client.steps import Steps
from corolla.client.substitutes import POLL_S, Substitutes
from corolla.clock import loop_time
from corolla.errors import HopFailed, MissingBlocks, NoRoute, Refused
from corolla.ids import PeerId, short

log = logging.getLogger(__name__)


class Mover:
    """One session's moves; at most one at a time, and none while the route is being mended."""

    def __init__(
        self, swarm: SwarmAccess, ring: Ring, steps: Steps, substitutes: Substitutes, between_steps: asyncio.Lock
    ) -> None:
        """`between_steps` is held while steps are under way."""
        self._swarm = swarm
        self._ring = ring
        self._steps = steps
        self._substitutes = substitutes
        self._between_steps = between_steps
        self._task: asyncio.Task[None] | None = None
        self._deadline = 0.0
        self._is_still = False
        self._is_closed = False

    def on_drain(self, peer: PeerId, deadline_s: float) -> None:
        """This server leaves in so many seconds."""
        self._substitutes.draining.add(peer)
        self._deadline = max(self._deadline, loop_time() + deadline_s)
        self._begin()

    @asynccontextmanager
    async def kept_still(self) -> AsyncIterator[None]:
        """Nobody moves inside the block: two hands on a route would open the same session twice."""
        self._is_still = True
        try:
            if self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task])
            yield
        finally:
            self._is_still = False
            self._begin()

    def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        is_busy = self._is_still or (self._task is not None and not self._task.done())
        if not is_busy and not self._is_closed and self._leaving() is not None:
            self._task = asyncio.get_running_loop().create_task(self._move_away(self._deadline))

    def _leaving(self) -> int | None:
        """The first place of the route whose server drains."""
        draining = self._substitutes.draining
        return next((index for index, place in enumerate(self._ring.places) if place.peer in draining), None)

    async def _move_away(self, deadline: float) -> None:
        while loop_time() < deadline and (index := self._leaving()) is not None:
            try:
                async with asyncio.timeout(deadline - loop_time()):
                    await self._swap(index)
            except TimeoutError:
                return
            except (NoRoute, HopFailed, Refused, PlacesFailed) as failed:
                log.info("no substitute yet", extra={"reason": str(failed)[:200]})
                await asyncio.sleep(POLL_S)

    async def _swap(self, index: int) -> None:
        """One server alone stands by for the one at this place, and takes it once it has caught up."""
        place, state = self._ring.places[index], self._state()
        in_use = frozenset(other.peer for other in self._ring.places)
        route = await self._substitutes.find(range(place.start, place.end), without=in_use)
        if len(route.hops) > 1:
            blocks = list(range(place.start, place.end))
            raise MissingBlocks(blocks, "one server alone must stand by for another")
        peer = next(iter(route.hops)).peer
        link = await self._swarm.link(peer)
        if self._state() != state:
            return
        hop = self._ring.standby[peer] = self._ring.new_hop(link, place.start, place.end)
        try:
            await self._ring.build_aside(hop, index)
            async with self._between_steps:
                if self._state() == state and hop.error is None:
                    await self._take(index, hop)
                    log.info("moved", extra={"from": short(place.peer), "to": short(peer)})
        finally:
            if self._ring.standby.get(peer) is hop:
                del self._ring.standby[peer]
                if hop not in self._ring.hops:
                    hop.close()

    async def _take(self, index: int, hop: Hop) -> None:
        places = list(self._ring.places)
        places[index] = Place(hop.peer, hop.start, hop.end, catches_up=True)
        await self._ring.take(places)

    def _state(self) -> tuple[int, int]:
        """Another one: the route or the history has changed, and what was begun is worthless."""
        return self._ring.version, self._steps.rewrites
