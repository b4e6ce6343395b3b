"""Who takes a lost place: others for just the lost blocks, or a whole new route that keeps whom it can."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from corolla.client.access import SwarmAccess
from corolla.client.config import ClientConfig
from corolla.client.reaching import first_to_answer
from corolla.client.recovery import Place, lost_runs, replace_lost
from corolla.client.router import ServedModel
from corolla.client.slowness import is_worth
from corolla.clock import loop_time
from corolla.errors import HopFailed, MissingBlocks, RemoteProtocolError, SwarmError, as_ranges
from corolla.ids import PeerId, short
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Route, RouteHop, price_route

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often a swarm that does not cover a block is looked at again."""


class Substitutes:
    """One session's choice of servers; remembers whom it leaves out."""

    def __init__(
        self, swarm: SwarmAccess, model: ServedModel, config: ClientConfig, *, tokens_needed: int, cost: CostModel
    ) -> None:
        self.draining: set[PeerId] = set()
        """Servers that said they leave: the last to be chosen. One that only moved may be all there is in the end."""
        self._swarm = swarm
        self._model = model
        self._cost = cost
        self._shun_s = config.shun_s
        self._tokens_needed = tokens_needed
        self._shunned: dict[PeerId, float] = {}
        self._is_told = False

    async def wait_for(self, places: Sequence[Place], lost: set[int], deadline: float) -> list[Place]:
        """The places with others in the lost ones' stead; the whole route when there is none yet.

        While nothing covers a block, waits for a server to appear. Raises MissingBlocks when none has in time,
        Unsupported when those that are there take no session as long as this.
        """
        for index in lost:
            self.shun(places[index].peer)
        while True:
            try:
                return await self._choose(places, lost)
            except MissingBlocks as missing:
                if loop_time() >= deadline:
                    self._swarm.router(self._model).refuse_if_too_long(self._cost.session_tokens)
                    raise
                self.tell_waiting(missing.blocks)
                await asyncio.sleep(POLL_S)

    def begin(self) -> None:
        """A recovery begins."""
        self._is_told = False

    def tell_waiting(self, blocks: Sequence[int]) -> None:
        """Say, once in a recovery, what is waited for."""
        if not self._is_told:
            log.warning("no server for block(s) %s: waiting for one", as_ranges(blocks))
            self._is_told = True

    async def find(
        self, blocks: range, *, without: frozenset[PeerId], spare_shunned: bool = True, alone: bool = False
    ) -> Route:
        """A route over these blocks, past all that are left out; `alone`: of one server. Raises MissingBlocks."""
        left_out = self._left_out(without, spare_shunned=spare_shunned)
        return await self._swarm.find_route(
            self._model, blocks=blocks, tokens_needed=self._tokens_needed, without=left_out, cost=self._cost,
            alone=alone,
        )  # fmt: skip

    async def find_answering(
        self, blocks: range, *, without: frozenset[PeerId], spare_shunned: bool = True, alone: bool = False
    ) -> Route:
        """Like `find`, of servers that answer a dial: others are dialled too while the best does not.

        Raises PlacesFailed when nobody does.
        """
        router = self._swarm.router(self._model)

        def next_best(unanswered: frozenset[PeerId]) -> Route | None:
            left_out = unanswered | self._left_out(without, spare_shunned=spare_shunned)
            try:
                return router.find_part(
                    blocks, tokens_needed=self._tokens_needed, without=left_out, cost=self._cost, alone=alone
                )
            except MissingBlocks:
                return None

        best = await self.find(blocks, without=without, spare_shunned=spare_shunned, alone=alone)
        return await first_to_answer(best, next_best, self._swarm.link, router.rtts_s)

    def is_better_than(self, place: Place, route: Route) -> bool:
        """Whether this route over the place's blocks costs so much less that moving is worth it."""
        view = self._swarm.router(self._model).usable_view()
        here = price_route(
            view, [RouteHop(place.peer, place.start, place.end)], self._cost, tokens_needed=self._tokens_needed
        )
        return here is None or is_worth(here.total_s - here.penalty_s, route.cost_s)

    def leave_out(self, errors: Mapping[PeerId, SwarmError]) -> None:
        """These would not take their place."""
        router = self._swarm.router(self._model)
        for peer, error in errors.items():
            self.shun(peer)
            if isinstance(error, HopFailed | RemoteProtocolError):  # our own evidence; a refusal is no fault
                router.saw_fault(peer)
            log.info("server left out", extra={"peer": short(peer), "reason": str(error)[:200]})

    def shun(self, peer: PeerId) -> None:
        self._shunned[peer] = loop_time() + self._shun_s

    def _left_out(self, without: frozenset[PeerId], *, spare_shunned: bool) -> frozenset[PeerId]:
        now = loop_time()
        shunned = frozenset(peer for peer, until in self._shunned.items() if until > now)
        return without | shunned | self.draining if spare_shunned else without

    async def _choose(self, places: Sequence[Place], lost: set[int]) -> list[Place]:
        """Past those that failed before, if anybody else is there; else they get another chance."""
        try:
            return await self._choose_from(places, lost, spare_shunned=True)
        except MissingBlocks:
            return await self._choose_from(places, lost, spare_shunned=False)

    async def _choose_from(self, places: Sequence[Place], lost: set[int], *, spare_shunned: bool) -> list[Place]:
        if places:
            try:
                return await self._choose_apart(places, lost, spare_shunned=spare_shunned)
            except MissingBlocks:
                log.debug("no server for the lost blocks alone")
        whole = range(self._model.num_blocks)
        route = await self.find_answering(whole, without=frozenset(), spare_shunned=spare_shunned)
        kept = {(place.peer, place.start, place.end): place for place in places}
        return [
            kept.get((hop.peer, hop.start, hop.end)) or Place(hop.peer, hop.start, hop.end, is_fresh=True)
            for hop in route.hops
        ]

    async def _choose_apart(self, places: Sequence[Place], lost: set[int], *, spare_shunned: bool) -> list[Place]:
        """Others for just the lost blocks: everyone else keeps the cache."""
        taken = {place.peer for index, place in enumerate(places) if index not in lost}
        substitutes: dict[int, Route] = {}
        for blocks in lost_runs(places, lost):
            route = substitutes[blocks.start] = await self.find_answering(
                blocks, without=frozenset(taken), spare_shunned=spare_shunned
            )
            taken |= {hop.peer for hop in route.hops}  # one place for each server: it knows a session by its id
        return replace_lost(places, lost, substitutes)
