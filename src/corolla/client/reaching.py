"""Finds, of several routes, the first whose servers all answer a dial.

Dead servers stay announced for minutes, and a dial to one may take all of its time: a frozen peer holds up the lookup
of addresses, a cut cable says nothing. So the second best is dialled while the best has not answered yet, and so on
(RFC 8305, "happy eyeballs"). Only dials race: no session is opened and nothing is leased before one has won. The
other dials go on without us, so that it comes out who is dead (`client/swarm.py`).
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from corolla.client.outcomes import MAY_DO_ELSEWHERE, PlacesFailed
from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.swarm.route import Route

HEAD_START_S = 0.2
"""What a route has before the next best is dialled too (RFC 8305 §5: 0.25 s), besides what its distance takes."""
DIAL_ROUND_TRIPS = 5
"""TCP, encryption, multiplexing and the stream's protocol; one, where there is a connection already."""
UNKNOWN_RTT_S = 0.05
LONGEST_HEAD_START_S = 1.0
MAX_DIALS = 8
"""At once: many dead may still be announced, and a swarm is not to be hammered."""

Dial = Callable[[PeerId], Coroutine[Any, Any, object]]
NextBest = Callable[[frozenset[PeerId]], Route | None]
"""The best route without these servers; None: there is none."""


async def first_to_answer(best: Route, next_best: NextBest, dial: Dial, rtts_s: Mapping[PeerId, float]) -> Route:
    """The best route, or where it does not answer in time, the first that does.

    `rtts_s`: known round trips. Raises PlacesFailed, with what became of each dial, when there is no other any more.
    """
    race, route = _Race(dial), best
    try:
        while True:
            if route is not None:
                race.enter(route)
            elif not race.running:
                raise PlacesFailed(race.errors, _blocks_of(best, race.errors))
            await race.news(None if route is None else _head_start_s(route, rtts_s))
            if (winner := race.winner) is not None:
                return winner
            route = next_best(race.unanswered) if len(race.running) < MAX_DIALS else None
    finally:
        await race.end()


class _Race:
    """The routes that run, and a dial for each of their servers."""

    def __init__(self, dial: Dial) -> None:
        self.errors: dict[PeerId, SwarmError] = {}
        self._dial = dial
        self._routes: list[Route] = []
        self._dials: dict[PeerId, asyncio.Task[object]] = {}
        self._answered: set[PeerId] = set()

    @property
    def running(self) -> list[asyncio.Task[object]]:
        return [dial for dial in self._dials.values() if not dial.done()]

    @property
    def unanswered(self) -> frozenset[PeerId]:
        return frozenset(self._dials.keys() - self._answered)

    @property
    def winner(self) -> Route | None:
        """The best of those that have answered."""
        return next((route for route in self._routes if self._answered.issuperset(_peers(route))), None)

    def enter(self, route: Route) -> None:
        self._routes.append(route)
        for peer in _peers(route):
            if peer not in self._dials:
                self._dials[peer] = asyncio.get_running_loop().create_task(self._dial(peer))

    async def news(self, limit_s: float | None) -> None:
        """Wait until a route has answered or a dial has failed, or for this long."""
        try:
            async with asyncio.timeout(limit_s):
                while self.winner is None and (running := self.running):
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    if self._note_outcomes():
                        return
        except TimeoutError:
            self._note_outcomes()  # one may have come in the same turn of the loop

    async def end(self) -> None:
        """Wait for nobody's answer any more."""
        for dial in self.running:
            dial.cancel()
        await asyncio.gather(*self._dials.values(), return_exceptions=True)

    def _note_outcomes(self) -> bool:
        """Whether one has failed that had not before."""
        num_failed = len(self.errors)
        for peer, dial in self._dials.items():
            if dial.done():
                error = dial.exception()
                if error is None:
                    self._answered.add(peer)
                elif isinstance(error, MAY_DO_ELSEWHERE):
                    self.errors[peer] = error
                else:
                    raise error
        return len(self.errors) > num_failed


def _peers(route: Route) -> list[PeerId]:
    return [hop.peer for hop in route.hops]


def _head_start_s(route: Route, rtts_s: Mapping[PeerId, float]) -> float:
    """None for a distance where a ping was not answered: it may well be dead."""
    known = [rtts_s.get(peer, UNKNOWN_RTT_S) for peer in _peers(route)]
    farthest_s = max((rtt_s for rtt_s in known if math.isfinite(rtt_s)), default=0.0)
    return min(HEAD_START_S + DIAL_ROUND_TRIPS * farthest_s, LONGEST_HEAD_START_S)


def _blocks_of(route: Route, peers: Mapping[PeerId, SwarmError]) -> list[int]:
    return [block for hop in route.hops if hop.peer in peers for block in range(hop.start, hop.end)]
