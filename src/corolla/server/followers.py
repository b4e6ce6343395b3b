"""Measures the round trips to servers that may come after this one in a route, for its announcement.

Routing needs the delay between two servers, and nobody but they can measure it. A server reads who is there now and
then, pings those whose spans go on where its own ends, and announces the nearest.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from corolla.clock import loop_time
from corolla.errors import HopFailed
from corolla.ids import PeerId, short
from corolla.net.streams import Transport
from corolla.swarm.announcement import MAX_NEXT_RTTS, UNREACHABLE_RTT_S, short_peer
from corolla.swarm.rtt import Rtt, after_sample
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher

log = logging.getLogger(__name__)

PING_TIMEOUT_S: Final = 2.0
FIRST_PERIODS_S: Final = (2.0, 10.0, 30.0)
"""After joining: those who come at the same time are not all there yet."""
PERIOD_S: Final = 120.0
PERIOD_PER_SERVER_S: Final = 2.0
"""The more servers, the more seldom each reads: those who keep the records are asked no more often for it."""
LONGEST_PERIOD_S: Final = 1800.0
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
        self.next_rtts: dict[str, float] = {}
        """What to announce: the nearest of those that may follow, in seconds by `short_peer`."""

    async def keep_measured(self, first_periods_s: Sequence[float] = FIRST_PERIODS_S) -> None:
        """Read the swarm and measure again and again, until cancelled. What placement has read meanwhile will do."""
        first_periods, measured_as_of = iter(first_periods_s), None
        while True:
            if self._watcher.read_at == measured_as_of:
                await self._watcher.refresh()
            measured_as_of = self._watcher.read_at
            await self.measure()
            num_servers = len(self._watcher.view.servers)
            await asyncio.sleep(next(first_periods, None) or draw_period_s(num_servers, self._rng))

    async def measure(self) -> None:
        """Ping some of those that may follow."""
        view, span = self._watcher.view, self._span()
        peers = pick_followers(view, self._transport.peer, span, self._rtts, self._rng)
        await asyncio.gather(*(self._ping(peer) for peer in peers))
        self._rtts = {peer: rtt for peer, rtt in self._rtts.items() if may_follow(view, peer, span)}
        self.next_rtts = nearest_rtts(self._rtts)

    async def _ping(self, peer: PeerId) -> None:
        try:
            sample_s = await self._transport.ping(peer, timeout_s=PING_TIMEOUT_S)
        except HopFailed as failed:
            log.debug("no ping", extra={"peer": short(peer), "reason": failed.reason})
            sample_s = math.inf
        self._rtts[peer] = after_sample(self._rtts.get(peer), sample_s, loop_time())


def draw_period_s(num_servers: int, rng: random.Random) -> float:
    """From one reading to the next."""
    return min(max(PERIOD_S, PERIOD_PER_SERVER_S * num_servers), LONGEST_PERIOD_S) * rng.uniform(0.75, 1.0)


def may_follow(view: View, peer: PeerId, span: range) -> bool:
    """Whether a route that leaves `span` at its end can go on at this server."""
    server = view.servers.get(peer)
    return server is not None and server.is_usable and server.start <= span.stop < server.end


def nearest_rtts(rtts: Mapping[PeerId, Rtt]) -> dict[str, float]:
    """The nearest of these, as many as an announcement takes; one that did not answer counts as very far."""
    nearest = sorted(rtts, key=lambda peer: rtts[peer].rtt_s)[:MAX_NEXT_RTTS]
    return {short_peer(peer): min(rtts[peer].rtt_s, UNREACHABLE_RTT_S) for peer in nearest}


def pick_followers(
    view: View, own: PeerId, span: range, rtts: Mapping[PeerId, Rtt], rng: random.Random, *, limit: int = MAX_PINGED
) -> list[PeerId]:
    """Whom to ping now: half of them the nearest known ones, to keep them true; then those unknown for longest."""
    candidates = [peer for peer in view.servers if peer != own and may_follow(view, peer, span)]
    known = sorted((peer for peer in candidates if peer in rtts), key=lambda peer: rtts[peer].rtt_s)
    nearest = known[: limit // 2]
    others = [peer for peer in candidates if peer not in nearest]
    rng.shuffle(others)
    others.sort(key=lambda peer: rtts[peer].at if peer in rtts else -math.inf)
    return nearest + others[: limit - len(nearest)]
