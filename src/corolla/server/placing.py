"""The server's side of placement: claim a span so that no two take the same gap, and move when it is worth it.

Decisions are `swarm/placement.py` and `swarm/rebalance.py`; here is the talk around them. A claim is an announcement
with the state `joining` and the intended span. Then one waits a moment and reads again: a claim that appeared
meanwhile, overlaps ours and comes from a lower peer id has precedence, and we choose anew with it counted. Claims
seen at the first look were counted already, and their owners cannot have known ours: nobody yields to those twice.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

from corolla.clock import loop_time
from corolla.ids import PeerId
from corolla.swarm.cost import CostModel
from corolla.swarm.rebalance import LEAST_GAIN, SETTLED_GAIN, Model, choose_move, plan_for
from corolla.swarm.view import ServerView, View

log = logging.getLogger(__name__)

MAX_ASKED: Final = 16
"""Servers asked at one reading whether they live."""
LATE_SHARE: Final = 0.1
"""Of the period: so much later than it should be, an announcement is overdue. Renewals come early, never late."""
MAX_CLAIMS: Final = 8
"""After so many the last choice stands: two servers on one span beat none that serves."""


@dataclass(frozen=True, slots=True)
class PlacingConfig:
    """Times in seconds."""

    least_wait_s: float = 1.0
    """From a claim to the second look; longer than a record takes to be seen by all."""
    longest_wait_s: float = 3.0
    mean_check_s: float = 60.0
    """Between two looks whether to move: uniform between none and twice this, so that servers take turns."""
    check_per_server_s: float = 0.5
    """In a large swarm each looks more seldom (a thousand: every 500 s), so that reading costs no more in sum."""
    settling_check_s: float = 20.0
    """The same once moving has been found worth it: several servers may have to move one after the other."""
    settling_s: float = 900.0
    """How long after a look at which moving was worth it smaller gains are taken along."""
    following_s: float = 300.0
    """The same after a look at which another had moved: not everybody looks while the whole gain is still there."""

    def __post_init__(self) -> None:
        if not 0 < self.least_wait_s <= self.longest_wait_s or not self.mean_check_s > 0:
            raise ValueError(f"placing needs 0 < least_wait_s ≤ longest_wait_s and mean_check_s above 0, not {self}")


class Publisher(Protocol):
    """How a server reads the swarm and says where it stands."""

    async def read(self) -> View:
        """Who is there now, without those known to be dead (`without_silent`)."""
        ...

    async def claim(self, span: range) -> None:
        """Announce that this span is taken: the state `joining`, or `moving_to` beside the blocks served meanwhile."""
        ...

    async def stay(self) -> None:
        """Announce again what is served, in the place of a claim that was given up."""
        ...


async def claim_span(
    publisher: Publisher, own: PeerId, choose: Callable[[View], range], *, rng: random.Random, config: PlacingConfig
) -> range:
    """The span to load, claimed against others who join at the same time. `choose` is a pure choice from a view."""
    seen = await publisher.read()
    span = choose(seen)
    for _ in range(MAX_CLAIMS):
        await publisher.claim(span)
        await asyncio.sleep(rng.uniform(config.least_wait_s, config.longest_wait_s))
        now = await publisher.read()
        if not any(_overlaps(rival, span) for rival in rivals(now, seen, own)):
            return span
        again = choose(without_inferior(now, seen, own))
        if again == span:
            return span
        log.info("another server was first", extra={"blocks": f"{span.start}:{span.stop}"})
        span, seen = again, now
    return span


async def without_silent(
    view: View, answers: Callable[[PeerId], Awaitable[bool]], *, wall_now: float, lifetime_s: float, period_s: float
) -> View:
    """The view without servers that are late with their announcement and do not answer either.

    A dead server's record lives on for minutes, because clocks differ; a missed renewal is seen much sooner. A clock
    that is off only makes us ask a server that is well.
    """
    late = overdue(view, wall_now=wall_now, lifetime_s=lifetime_s, period_s=period_s)[:MAX_ASKED]
    alive = await asyncio.gather(*(answers(peer) for peer in late))
    return view.without(peer for peer, is_alive in zip(late, alive, strict=True) if not is_alive)


def overdue(view: View, *, wall_now: float, lifetime_s: float, period_s: float) -> list[PeerId]:
    """Servers that should have renewed their announcement by now; the latest first."""
    renewed_at = {peer: server.expires_at - lifetime_s for peer, server in view.servers.items()}
    late = [peer for peer, at in renewed_at.items() if wall_now - at > period_s * (1 + LATE_SHARE)]
    return sorted(late, key=lambda peer: (renewed_at[peer], peer))


def rivals(now: View, seen: View, own: PeerId) -> list[ServerView]:
    """Claims that have precedence over ours: new since we chose, and of a lower peer id."""
    return [server for server in _new_claims(now, seen) if server.peer < own]


def without_inferior(now: View, seen: View, own: PeerId) -> View:
    """The view that a claim is judged by: without those new ones that must give way to ours."""
    return now.without([own, *(server.peer for server in _new_claims(now, seen) if server.peer > own)])


def _new_claims(now: View, seen: View) -> list[ServerView]:
    def is_new(server: ServerView) -> bool:
        before = seen.servers.get(server.peer)
        return server.claim is not None and (before is None or before.claim != server.claim)

    return [server for server in now.servers.values() if is_new(server)]


def anyone_moved(before: View, now: View, own: PeerId) -> bool:
    """Whether another server that served at the first look has left its span since, or has claimed a new one."""
    stood = {server.peer: _place(server) for server in before.servers.values() if server.is_online}
    return any(stood.get(peer, _place(server)) != _place(server) for peer, server in now.servers.items() if peer != own)


def _place(server: ServerView) -> range:
    """Where it is, or will be soon."""
    return server.claim or range(server.start, server.end)


def _overlaps(server: ServerView, span: range) -> bool:
    place = _place(server)
    return place.start < span.stop and span.start < place.stop


async def keep_placed(
    publisher: Publisher,
    own: PeerId,
    move: Callable[[range], Awaitable[None]],
    *,
    cuts: Collection[int] | None,
    cost: CostModel,
    rng: random.Random,
    config: PlacingConfig,
) -> None:
    """Look again and again whether the swarm would be better with this server elsewhere, and go. Until cancelled.

    `move` brings the server to a span and returns when it is announced there: load, drain and switch are its own
    (`memory.transition` says in which order).
    """
    settling_until, num_servers, before = -math.inf, 0, View.of(())
    while True:
        longest_s = longest_pause_s(num_servers, config, is_settling=loop_time() < settling_until)
        await asyncio.sleep(rng.uniform(0.0, longest_s))
        view = await publisher.read()
        num_servers = len(view.servers)
        model = Model(view.num_blocks, None if cuts is None else frozenset(cuts))
        if plan_for(view, model, cost).gain >= LEAST_GAIN:
            settling_until = loop_time() + config.settling_s
        elif anyone_moved(before, view, own):
            settling_until = max(settling_until, loop_time() + config.following_s)
        before = view
        least_gain = SETTLED_GAIN if loop_time() < settling_until else LEAST_GAIN

        def choose(view: View, model: Model = model, least_gain: float = least_gain) -> range | None:
            return choose_move(view, own, model, cost, least_gain=least_gain)

        span = await claim_move(publisher, own, view, choose, rng=rng, config=config)
        if span is not None:
            log.info("moving", extra={"blocks": f"{span.start}:{span.stop}"})
            await move(span)


def longest_pause_s(num_servers: int, config: PlacingConfig, *, is_settling: bool = False) -> float:
    """Between two looks whether to move: each pause is drawn evenly between none and this."""
    least_s = config.settling_check_s if is_settling else config.mean_check_s
    return 2 * max(least_s, config.check_per_server_s * num_servers)


async def claim_move(
    publisher: Publisher,
    own: PeerId,
    seen: View,
    choose: Callable[[View], range | None],
    *,
    rng: random.Random,
    config: PlacingConfig,
) -> range | None:
    """Where to move to now, claimed; None: nowhere. `choose` is a pure choice from a view in which we serve."""
    here = seen.servers.get(own)
    span = choose(seen) if here is not None and here.is_online else None
    if here is None or span is None:
        return None
    await publisher.claim(span)
    await asyncio.sleep(rng.uniform(config.least_wait_s, config.longest_wait_s))
    if choose(without_inferior(await publisher.read(), seen, own).including(here)) == span:
        return span
    await publisher.stay()
    return None
