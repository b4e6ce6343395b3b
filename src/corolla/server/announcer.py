"""Keeps a server announced: a signed record of what it serves, renewed while it lives, taken back when it leaves.

It is renewed periodically, and soon after what it says has become wrong (`is_news`): a full cache that still is
announced as empty draws sessions that must be refused. How often at most is bounded, so that a busy server does not
flood those who keep its record. `benchmarks/announcing.py` measures what all this costs.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from corolla.clock import loop_time
from corolla.ids import PeerId
from corolla.net.streams import Transport
from corolla.swarm.announcement import (
    MAX_INFLOWS,
    MODELS_KEY,
    UNREACHABLE_RTT_S,
    Announcement,
    ModelEntry,
    announcement_key,
)
from corolla.swarm.view import View

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often a server looks whether what it announced still is true."""
LEAST_GAP_S: Final = 10.0
"""Between two announcements, whatever happens, but the state: at most six a minute."""
PERIOD_JITTER: Final = 0.1
"""Of the period, so that servers that were started together do not all announce at the same moment."""
NEWS_SHARE: Final = 0.25
"""Free cache, speed or a queue that moved by this much of the larger value is news."""
NEWS_QUEUE_S: Final = 0.05
MAX_INDEXERS: Final = 16
"""Servers of one model that list it among all models; more would crowd others out of that one key."""


class Announcer:
    """Publishes what `describe` says: now, periodically, and when it has changed. `describe` is asked each second."""

    def __init__(
        self,
        transport: Transport,
        describe: Callable[[], Announcement],
        *,
        period_s: float,
        lifetime_s: float,
        view: Callable[[], View] = lambda: View(0),
        rng: random.Random | None = None,
    ) -> None:
        """`view`: the model's servers as far as this one has read them."""
        self._transport = transport
        self._describe = describe
        self._period_s = period_s
        self._lifetime_s = lifetime_s
        self._view = view
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._said: Announcement | None = None
        self._said_at = float("-inf")

    async def announce(self) -> bool:
        """Publish once, in the index of models too. False: no other peer keeps the record.

        Whether one does is that peer's own word, read back once after joining (`Records.put`): a server that only
        believes to be announced says so.
        """
        said = self._describe()
        kept = await self._publish(said)
        if is_indexer(self._view(), self._transport.peer):
            entry = ModelEntry(name=said.model_name, fingerprint=said.fingerprint, num_blocks=said.num_blocks)
            await self._transport.records.put(MODELS_KEY, entry.encode(), self._lifetime_s)
        return kept

    async def keep_announced(self) -> None:
        """Renew the record until cancelled."""
        while True:
            if not await self.announce():
                log.warning("no other peer keeps this server's announcement; it is repeated")
            renew_at = loop_time() + self._period_s * (1 - PERIOD_JITTER * self._rng.random())
            while await self._wait_for_news(renew_at):
                await self._publish(self._describe())

    async def withdraw(self) -> None:
        """Take the announcement back: clients stop choosing this server, and nobody lists it any more.

        The last record outlives the one before it: peers keep whichever expires later.
        """
        await self._publish(msgspec.structs.replace(self._describe(), state="left"))

    async def _publish(self, said: Announcement) -> bool:
        self._said, self._said_at = said, loop_time()
        key = announcement_key(said.fingerprint, self._transport.peer)
        return await self._transport.records.put(key, said.encode(), self._lifetime_s)

    async def _wait_for_news(self, until: float) -> bool:
        """True when there is something to say before `until`, False when that time has come."""
        while (left_s := until - loop_time()) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
            if self._has_news():
                return True
        return False

    def _has_news(self) -> bool:
        said, now = self._said, self._describe()
        if said is None or said.state != now.state:
            return True
        return loop_time() - self._said_at >= LEAST_GAP_S and is_news(said, now)


def is_news(said: Announcement, now: Announcement) -> bool:
    """Whether what was announced has become so wrong that others would choose badly by it."""
    if (said.state, said.start, said.end, said.moving_to) != (now.state, now.start, now.end, now.moving_to):
        return True
    if said.adapters != now.adapters:
        return True
    if said.next_rtts.keys() != now.next_rtts.keys() or _unreachable(said) != _unreachable(now):
        return True
    if _has_other_links(said.inflows, now.inflows):
        return True
    if abs(said.queue_s - now.queue_s) > max(NEWS_QUEUE_S, NEWS_SHARE * max(said.queue_s, now.queue_s)):
        return True
    pairs = (
        (said.free_cache_tokens, now.free_cache_tokens),
        (said.decode_tokens_per_s, now.decode_tokens_per_s),
        (said.prefill_tokens_per_s, now.prefill_tokens_per_s),
    )
    return any(abs(before - after) > NEWS_SHARE * max(before, after) for before, after in pairs)


def _unreachable(said: Announcement) -> set[str]:
    return {peer for peer, rtt_s in said.next_rtts.items() if rtt_s >= UNREACHABLE_RTT_S}


def _has_other_links(said: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """A link was measured for the first time, or carries half or twice what was said. Where there are more than an
    announcement takes, which of them are the slowest changes all the time: that alone is no news."""
    if len(said) < MAX_INFLOWS and now.keys() - said.keys():
        return True
    pairs = [(said[peer], now[peer]) for peer in said.keys() & now.keys()]
    return any(max(pair) >= 2 * min(pair) for pair in pairs)


def is_indexer(view: View, peer: PeerId) -> bool:
    """Whether this server is among the few that list the model: the first by hash of those that are known."""
    own = _rank(peer)
    return sum(1 for other in view.servers if other != peer and _rank(other) < own) < MAX_INDEXERS


@lru_cache(maxsize=4096)
def _rank(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()
