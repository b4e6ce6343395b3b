"""Leaves a server that still serves, because it drains or has become slow: make before break.

A substitute is built up beside the route while the old server works on, then takes its place between two steps; no
step waits for more than that. A trim, a row gather or another change of the route in between makes what the
substitute has heard worthless: then it begins again. When time runs out, the old server is lost like any other.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from corolla.client.hop import Hop
from corolla.client.recovery import Place
from corolla.client.ring import PlacesFailed, Ring, SwarmAccess
from corolla.client.router import ServedModel
from corolla.client.slowness import Pace, Patience, after_look, after_step, is_stuck, pick_slow
from corolla.client.steps import Steps
from corolla.client.substitutes import POLL_S, Substitutes
from corolla.clock import loop_time
from corolla.errors import HopFailed, LinkDown, MissingBlocks, NetworkLost, NoRoute, Refused, RemoteProtocolError
from corolla.ids import PeerId, short
from corolla.swarm.route import Route
from corolla.wire.messages import HopTiming

log = logging.getLogger(__name__)

SLOW_MOVE_S = 60.0
"""For a move away from a slow server; one that takes longer is not worth having."""
_ITS_FAULT = (HopFailed, LinkDown, Refused, RemoteProtocolError)
"""What a server that will not stand by, or cannot, looks like: another is asked next."""
_NOT_NOW = (NoRoute, PlacesFailed, *_ITS_FAULT)


class Mover:
    """One session's moves; at most one at a time, and none while the route is being mended."""

    def __init__(
        self,
        swarm: SwarmAccess,
        model: ServedModel,
        ring: Ring,
        steps: Steps,
        substitutes: Substitutes,
        between_steps: asyncio.Lock,
    ) -> None:
        """`between_steps` is held while steps are under way."""
        self._swarm = swarm
        self._model = model
        self._ring = ring
        self._steps = steps
        self._substitutes = substitutes
        self._between_steps = between_steps
        self._task: asyncio.Task[None] | None = None
        self._deadline = 0.0
        self._paces: dict[PeerId, Pace] = {}
        self._rows = 0
        self._patience = Patience()
        self._is_still = False
        self._is_closed = False

    def on_drain(self, peer: PeerId, deadline_s: float) -> None:
        """This server leaves in so many seconds."""
        self._substitutes.draining.add(peer)
        self._deadline = max(self._deadline, loop_time() + deadline_s)
        self._begin()

    def on_decode_step(self, timings: Sequence[HopTiming], rows: int) -> None:
        """Each hop's times in a step that came back. A hop that has become slow by itself may be left."""
        known = self._paces if rows == self._rows else {}  # more rows take longer everywhere
        peers = [place.peer for place in self._ring.places]
        self._rows, self._paces = (
            rows,
            {
                peer: after_step(known.get(peer), timing.queue_s + timing.compute_s)
                for peer, timing in zip(peers, timings, strict=True)
            },
        )
        slow, now = pick_slow(list(self._paces.values())), loop_time()
        if slow is not None and now >= self._patience.until and not self.is_busy and not self._is_closed:
            self._patience = after_look(self._patience, now)
            self._start(self._leave_slow(slow))

    def pick_stuck(self) -> Hop | None:
        """A hop that has a decode step at work for far longer than is usual there; not more often than a slow one."""
        now = loop_time()
        if now < self._patience.until or any(pending.num_tokens > 1 for pending in self._steps.pending.values()):
            return None
        for hop in self._ring.hops:
            pace = self._paces.get(hop.peer)
            if pace is not None and is_stuck(pace, hop.link.life.peer_queue_s):
                self._patience = after_look(self._patience, now)
                return hop
        return None

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

    @property
    def is_busy(self) -> bool:
        return self._is_still or (self._task is not None and not self._task.done())

    def _begin(self) -> None:
        is_due = self._leaving() is not None and loop_time() < self._deadline
        if is_due and not self.is_busy and not self._is_closed:
            self._start(self._move_away(self._deadline))

    def _start(self, move: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(move)
        self._task.add_done_callback(lambda _: self._begin())

    def _leaving(self) -> int | None:
        """The first place of the route whose server drains."""
        draining = self._substitutes.draining
        return next((index for index, place in enumerate(self._ring.places) if place.peer in draining), None)

    async def _move_away(self, deadline: float) -> None:
        """From servers that drain, again and again until their time is up."""
        while loop_time() < deadline and (index := self._leaving()) is not None:
            try:
                async with asyncio.timeout(deadline - loop_time()):
                    await self._swap(index, await self._find(index))
            except (TimeoutError, NetworkLost):
                return
            except _NOT_NOW as failed:
                log.info("no substitute yet", extra={"reason": str(failed)[:200]})
                await asyncio.sleep(POLL_S)

    async def _leave_slow(self, index: int) -> None:
        """Once, and only for a server that promises much more, by what it announces now."""
        place = self._ring.places[index]
        log.info("server has become slow", extra={"peer": short(place.peer)})
        try:
            async with asyncio.timeout(SLOW_MOVE_S):
                await self._swarm.router(self._model).refresh()
                route = await self._find(index)
                if self._substitutes.is_better_than(place, route):
                    await self._swap(index, route)
        except (TimeoutError, NetworkLost, *_NOT_NOW) as failed:
            log.info("the slow server stays", extra={"reason": str(failed)[:200]})

    async def _find(self, index: int) -> Route:
        """One server alone, to stand by for the one at this place; who would not before, if nobody else is left."""
        place, substitutes = self._ring.places[index], self._substitutes
        blocks, in_use = range(place.start, place.end), frozenset(other.peer for other in self._ring.places)
        try:
            route = await substitutes.find_answering(blocks, without=in_use)
        except MissingBlocks:
            left_out = in_use | substitutes.draining
            route = await substitutes.find_answering(blocks, without=left_out, spare_shunned=False)
        if len(route.hops) > 1:
            raise MissingBlocks(list(blocks), "one server alone must stand by for another")
        return route

    async def _swap(self, index: int, route: Route) -> None:
        """The server of this route stands by for the one at the place, and takes it once it has caught up.

        One that fails at it is left out from then on: there may be others.
        """
        peer = route.hops[0].peer
        try:
            await self._swap_with(index, peer)
        except _ITS_FAULT as failed:
            self._substitutes.leave_out({peer: failed})
            raise

    async def _swap_with(self, index: int, peer: PeerId) -> None:
        place, state = self._ring.places[index], self._state()
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
