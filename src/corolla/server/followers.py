"""Measures the round trips to servers that may come after this one in a route, for its announcement.

Routing needs the delay between two servers, and nobody but they can measure it. A server reads who is there now and
then, pings those whose spans go on where its own ends, and announces the nearest.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Final

from corolla.clock import loop_time
from corolla.errors import HopFailed
from corolla.ids import PeerId, short
from corolla.net.streams import Transport
from corolla.swarm.announcement import MAX_NEXT_RTTS, UNREACHABLE_RTT_S, short_peer
from corolla.swarm.rtt import Rtt, after_sample, current
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher

log = logging.getLogger(__name__)

PING_TIMEOUT_S: Final = 2.0
FIRST_PERIODS_S: Final = (2.0, 10.0, 30.0)
"""After joining: those who come at the same time are not all there yet."""
PERIOD_S: Final = 120.0
PERIOD_PER_SERVER_S: Final = 1.0
"""In a swarm of a thousand each reads every thousand seconds: who keeps the records is asked as often as ever."""
MAX_PINGED: Final = 12


class Followers:
    """Owns the measurements; `keep_measured` runs beside the server."""

    def __init__(
        self, transport: Transport, watcher: Watcher, span: Callable[[], range], *, rng: random.Random | None = None
    ) -> None:
        self._transport = transport
        self._watcher = watcher
        self._span = span
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._rtts: dict[PeerId, Rtt] = {}

    @property
    def next_rtts(self) -> dict[str, float]:
        """What to announce: the nearest of those that may follow, in seconds by `short_peer`."""
        measured = {
            peer: rtt.rtt_s for peer, rtt in self._rtts.items() if may_follow(self._watcher.view, peer, self._span())
        }
        nearest = sorted(measured, key=lambda peer: measured[peer])[:MAX_NEXT_RTTS]
        return {short_peer(peer): min(measured[peer], UNREACHABLE_RTT_S) for peer in nearest}

    async def keep_measured(self) -> None:
        """Read the swarm and measure again and again, until cancelled."""
        first_periods = iter(FIRST_PERIODS_S)
        while True:
            await self._watcher.refresh()
            await self.measure()
            await asyncio.sleep(next(first_periods, None) or self._period_s())

    async def measure(self) -> None:
        """Ping some of those that may follow."""
        peers = pick_followers(self._watcher.view, self._transport.peer, self._span(), self._rtts, self._rng)
        await asyncio.gather(*(self._ping(peer) for peer in peers))
        fresh = current(self._rtts, loop_time() - self._period_s())  # measured once a period at best
        self._rtts = {peer: rtt for peer, rtt in self._rtts.items() if peer in fresh}

    def _period_s(self) -> float:
        longest_s = max(PERIOD_S, PERIOD_PER_SERVER_S * len(self._watcher.view.servers))
        return longest_s * self._rng.uniform(0.75, 1.0)

    async def _ping(self, peer: PeerId) -> None:
        try:
            sample_s = await self._transport.ping(peer, timeout_s=PING_TIMEOUT_S)
        except HopFailed as failed:
            log.debug("no ping", extra={"peer": short(peer), "reason": failed.reason})
            sample_s = math.inf
        self._rtts[peer] = after_sample(self._rtts.get(peer), sample_s, loop_time())


def may_follow(view: View, peer: PeerId, span: range) -> bool:
    """Whether a route that leaves `span` at its end can go on at this server."""
    server = view.servers.get(peer)
    return server is not None and server.is_usable and server.start <= span.stop < server.end


def pick_followers(
    view: View, own: PeerId, span: range, rtts: dict[PeerId, Rtt], rng: random.Random, *, limit: int = MAX_PINGED
) -> list[PeerId]:
    """Whom to ping now: half of them the nearest known ones, to keep them true; then those unknown for longest."""
    candidates = [peer for peer in view.servers if peer != own and may_follow(view, peer, span)]
    known = sorted((peer for peer in candidates if peer in rtts), key=lambda peer: rtts[peer].rtt_s)
    nearest = known[: limit // 2]
    others = [peer for peer in candidates if peer not in nearest]
    rng.shuffle(others)
    others.sort(key=lambda peer: rtts[peer].at if peer in rtts else -math.inf)
    return nearest + others[: limit - len(nearest)]
