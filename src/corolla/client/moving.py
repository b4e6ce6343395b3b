"""Leaves a server that still serves, because it drains or has become slow: make before break.

A substitute is built up beside the route while the old server works on, then takes its place between two steps; no
step waits for more than that. A trim, a row gather or another change of the route in between makes what the
substitute has heard worthless: then it begins again.

Where no one server can stand by (only several have the blocks, or nobody kept the history), or none has caught up
before a drain's last seconds, the server is left by a recovery between two steps (`take_overdue`): the text waits for
that, and no step fails. When time runs out in the middle of a run, the old server is lost like any other.

    a drain begins      one server alone stands by, and takes the place         make before break
    its last seconds    others answer for the blocks: it is overdue             a recovery before the next step
    nobody answers      it is used as long as it serves                         a loss
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from corolla.client.access import SwarmAccess
from corolla.client.hop import Hop
from corolla.client.outcomes import PlacesFailed
from corolla.client.recovery import Place
from corolla.client.ring import Ring
from corolla.client.router import ServedModel
from corolla.client.slowness import Pace, Patience, after_look, after_step, is_stuck, pick_slow
from corolla.client.steps import Steps
from corolla.client.substitutes import POLL_S, Substitutes
from corolla.clock import loop_time
from corolla.errors import (
    HopFailed,
    JournalGap,
    LinkDown,
    MissingBlocks,
    NetworkLost,
    NoRoute,
    Refused,
    RemoteProtocolError,
)
from corolla.ids import PeerId, short
from corolla.swarm.route import Route
from corolla.wire.messages import HopTiming

log = logging.getLogger(__name__)

SLOW_MOVE_S = 60.0
"""For a move away from a slow server; one that takes longer is not worth having."""
LAST_S = 10.0
LAST_SHARE = 0.25
"""The last seconds of a drain: so many, or this share of a shorter one. Long enough for a dial or two that are in vain,
and a step or two."""
_ITS_FAULT = (HopFailed, LinkDown, Refused, RemoteProtocolError)
"""What a server that will not stand by, or cannot, looks like: another is asked next."""
_NOT_NOW = (NoRoute, PlacesFailed, NetworkLost, *_ITS_FAULT)


@dataclass(frozen=True, slots=True)
class Leave:
    """When a server that drains is gone, by its own word; loop time."""

    last_from: float
    """From here on its last seconds run."""
    ends_at: float

    def is_last(self, now: float) -> bool:
        return now >= self.last_from


def leave_in(deadline_s: float, now: float) -> Leave:
    """Of a server that says now that it leaves in so many seconds."""
    return Leave(now + deadline_s - min(LAST_S, LAST_SHARE * deadline_s), now + deadline_s)


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
        self._leaves: dict[PeerId, Leave] = {}
        self._overdue: set[PeerId] = set()
        self._gap_in: tuple[int, int] | None = None
        """The state (`_state`) for which nobody has kept the history that a server would need to stand by."""
        self._paces: dict[PeerId, Pace] = {}
        self._rows = 0
        self._patience = Patience()
        self._is_still = False
        self._is_closed = False

    def on_drain(self, peer: PeerId, deadline_s: float) -> None:
        """This server leaves in so many seconds."""
        self._substitutes.draining.add(peer)
        self._leaves[peer] = leave_in(deadline_s, loop_time())
        self._begin()

    def take_overdue(self) -> list[Hop]:
        """Hops to be left now, between two steps: their servers are all but gone, and others have the blocks."""
        overdue, self._overdue = self._overdue, set()
        return [hop for hop in self._ring.hops if hop.peer in overdue]

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
        if self._leaving() is not None and not self.is_busy and not self._is_closed:
            self._start(self._move_away())

    def _start(self, move: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(move)
        self._task.add_done_callback(lambda _: self._begin())

    def _leaving(self) -> int | None:
        """The first place of the route whose server drains, has time left, and is not overdue."""
        now = loop_time()
        leaving = {peer for peer, leave in self._leaves.items() if now < leave.ends_at} - self._overdue
        return next((index for index, place in enumerate(self._ring.places) if place.peer in leaving), None)

    async def _move_away(self) -> None:
        """From servers that drain, again and again until their time is up."""
        while (index := self._leaving()) is not None:
            leave = self._leaves[self._ring.places[index].peer]
            try:
                if leave.is_last(loop_time()):
                    async with asyncio.timeout_at(leave.ends_at):
                        await self._look_for_others(index)
                else:
                    await self._stand_by(index, leave.last_from)
            except TimeoutError:
                continue
            except _NOT_NOW as failed:
                log.info("no substitute yet", extra={"reason": str(failed)[:200]})
                await asyncio.sleep(POLL_S)

    async def _stand_by(self, index: int, until: float) -> None:
        """Have one server alone take the place. Raises what keeps it from that; waits where nobody could."""
        state = self._state()
        if self._gap_in == state:
            await asyncio.sleep(POLL_S)
            return
        try:
            async with asyncio.timeout_at(until):
                route = await self._find(index, alone=True)
            await self._swap(index, route, until)
        except JournalGap as gap:
            log.info("nobody can stand by", extra={"reason": str(gap)[:200]})
            self._gap_in = state

    async def _look_for_others(self, index: int) -> None:
        """Let the place be left before the next step, if others have its blocks, or all. Raises what `_find` does."""
        peer = self._ring.places[index].peer
        if not self._ring.keeps_all and (index == 0 or self._gap_in == self._state()):
            raise JournalGap("with this server the session ends: it is used as long as it serves")
        try:
            await self._find(index)
        except MissingBlocks:  # those that are in use may have them, each with more than it does now
            whole = range(self._model.num_blocks)
            await self._substitutes.find_answering(
                whole, without=frozenset(self._substitutes.draining), spare_shunned=False
            )
        self._overdue.add(peer)

    async def _leave_slow(self, index: int) -> None:
        """Once, and only for a server that promises much more, by what it announces now."""
        place = self._ring.places[index]
        log.info("server has become slow", extra={"peer": short(place.peer)})
        until = loop_time() + SLOW_MOVE_S
        try:
            async with asyncio.timeout_at(until):
                await self._swarm.router(self._model).refresh()
                route = await self._find(index, alone=True)
            if self._substitutes.is_better_than(place, route):
                await self._swap(index, route, until)
        except (TimeoutError, *_NOT_NOW) as failed:
            log.info("the slow server stays", extra={"reason": str(failed)[:200]})

    async def _find(self, index: int, *, alone: bool = False) -> Route:
        """Others for this place; who would not before, if nobody else is left. `alone`: one server, to stand by."""
        place, substitutes = self._ring.places[index], self._substitutes
        blocks, in_use = range(place.start, place.end), frozenset(other.peer for other in self._ring.places)
        try:
            return await substitutes.find_answering(blocks, without=in_use, alone=alone)
        except MissingBlocks:
            left_out = in_use | substitutes.draining
            return await substitutes.find_answering(blocks, without=left_out, spare_shunned=False, alone=alone)

    async def _swap(self, index: int, route: Route, until: float) -> None:
        """The server of this route stands by for the one at the place, and takes it once it has caught up.

        Raises TimeoutError when it has not by `until`; a swap that has begun is not cut short. One that fails at it is
        left out from then on: there may be others.
        """
        peer = route.hops[0].peer
        try:
            await self._swap_with(index, peer, until)
        except JournalGap:
            raise  # others' fault, or nobody's
        except _ITS_FAULT as failed:
            self._substitutes.leave_out({peer: failed})
            raise

    async def _swap_with(self, index: int, peer: PeerId, until: float) -> None:
        place, state = self._ring.places[index], self._state()
        link = await self._swarm.link(peer)
        if self._state() != state:
            return
        hop = self._ring.standby[peer] = self._ring.new_hop(link, place.start, place.end)
        try:
            async with asyncio.timeout_at(until):
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
