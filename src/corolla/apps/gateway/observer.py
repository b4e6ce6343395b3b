"""Looks at the swarm again and again, for pages that live without reloading: the state now, and what changed lately.

A killed server's announcement stands for minutes. The pages must not call a model healthy that long, so servers are
pinged from here, and one that twice in a row gives no answer is `silent`: shown, but not counted on.

Looks are frequent while somebody watches, rare otherwise, and further apart in a large swarm. Watchers share each
look: `wait_for_news` gives the latest, so that a slow page misses some and delays nobody.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from corolla.apps.gateway.changes import Change, find_changes
from corolla.apps.status.reading import MAX_PINGED, ModelStatus, ping_all
from corolla.clock import loop_time
from corolla.ids import Fingerprint, PeerId
from corolla.net.streams import Transport
from corolla.swarm.announcement import MODELS_KEY, ModelEntry
from corolla.swarm.watch import Watcher, list_models

log = logging.getLogger(__name__)

MAX_MODELS: Final = 64
MAX_CHANGES: Final = 200
FAILED_PINGS: Final = 2
"""One lost answer says little; two are five to ten seconds of silence."""


@dataclass(frozen=True, slots=True)
class ObserverConfig:
    """How often to look, in seconds."""

    watched_period_s: float = 3.0
    unwatched_period_s: float = 20.0
    """What changed lately is worth knowing also when nobody was looking."""
    period_per_server_s: float = 0.02
    """A view of a thousand servers is megabytes: it is read every twenty seconds at most."""
    max_watchers: int = 64
    """Pages (and programs) that are told of every look at the same time."""


@dataclass(frozen=True, slots=True)
class SwarmState:
    """One look at the swarm."""

    number: int
    """Counts looks; 0 is before the first."""
    at: float
    """Wall time."""
    models: tuple[ModelStatus, ...] = ()
    changes: tuple[Change, ...] = ()
    """The latest, the newest first."""


class Observer:
    """Owns the state that the pages show. `keep_observed` must run, on the transport's loop."""

    def __init__(
        self, transport: Transport, *, served: Sequence[ModelEntry] = (), config: ObserverConfig | None = None
    ) -> None:
        """`served`: models that are shown even while no server announces them."""
        self._transport = transport
        self._served = {entry.fingerprint: entry for entry in served}
        self._config = config or ObserverConfig()
        self._watchers: dict[Fingerprint, Watcher] = {}
        self._failed_pings: dict[PeerId, int] = {}
        self._rtts: dict[PeerId, float] = {}
        self._in_line: list[PeerId] = []
        """For a ping, the longest unasked first."""
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._state = SwarmState(0, transport.wall_time())
        self._news = asyncio.Condition()
        self._num_watching = 0
        self._wanted = asyncio.Event()

    @property
    def state(self) -> SwarmState:
        """As last seen."""
        return self._state

    @property
    def silent(self) -> frozenset[PeerId]:
        """Servers of any model that are announced and did not answer."""
        return frozenset[PeerId]().union(*(status.silent for status in self._state.models))

    async def keep_observed(self) -> None:
        """Look now and again, until cancelled."""
        while True:
            began = loop_time()
            await self.look()
            self._wanted.clear()
            await self._rest(began)

    async def look(self) -> SwarmState:
        """Read the swarm and ping its servers now; whoever waits for news gets it. Never raises for what peers say."""
        found = list_models(await self._transport.records.get(MODELS_KEY))
        entries = list({**{entry.fingerprint: entry for entry in found[:MAX_MODELS]}, **self._served}.values())
        self._watchers = {
            entry.fingerprint: self._watchers.get(entry.fingerprint) or self._watcher(Fingerprint(entry.fingerprint))
            for entry in entries
        }
        views = await asyncio.gather(*(watcher.refresh() for watcher in self._watchers.values()))
        peers = list(dict.fromkeys(peer for view in views for peer in view.servers))
        await self._ping_some(peers)
        silent = frozenset(peer for peer, times in self._failed_pings.items() if times >= FAILED_PINGS)
        models = tuple(
            ModelStatus(
                entry,
                view.with_rtts(self._rtts),
                silent & view.servers.keys(),
                self._watchers[Fingerprint(entry.fingerprint)].rejected_last,
            )
            for entry, view in zip(entries, views, strict=True)
        )
        await self._publish(models)
        return self._state

    @property
    def is_crowded(self) -> bool:
        """As many watch as may."""
        return self._num_watching >= self._config.max_watchers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look more often in this block."""
        self._num_watching += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._num_watching -= 1

    async def wait_for_news(self, seen: int, timeout_s: float) -> SwarmState | None:
        """The latest state, once it is another than number `seen`; None when nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: self._state.number != seen)
        except TimeoutError:
            return None
        return self._state

    def _watcher(self, fingerprint: Fingerprint) -> Watcher:
        served = self._served.get(fingerprint)
        return Watcher(self._transport, fingerprint, num_blocks=served.num_blocks if served else None)

    async def _rest(self, began: float) -> None:
        """Until the next look is due; a first watcher makes it due sooner."""
        num_servers = sum(len(status.view.servers) for status in self._state.models)
        least_s = max(self._config.watched_period_s, self._config.period_per_server_s * num_servers)
        await asyncio.sleep(max(0.0, began + least_s - loop_time()))
        if self._num_watching == 0 and not self._wanted.is_set():
            try:
                async with asyncio.timeout(max(0.0, self._config.unwatched_period_s - least_s)):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def _ping_some(self, peers: Sequence[PeerId]) -> None:
        """The next of them in turn: in a large swarm not everybody is asked each time."""
        present, in_line = set(peers), set(self._in_line)
        newcomers = [peer for peer in peers if peer not in in_line]  # last: a flood of them holds nobody else up
        self._in_line = [*(peer for peer in self._in_line if peer in present), *newcomers]
        asked = self._in_line[:MAX_PINGED]
        self._in_line = [*self._in_line[MAX_PINGED:], *asked]
        answers = await ping_all(self._transport, asked)
        for peer in asked:
            self._failed_pings[peer] = 0 if peer in answers else self._failed_pings.get(peer, 0) + 1
            self._rtts.pop(peer, None)
        self._rtts.update(answers)
        self._failed_pings = {peer: times for peer, times in self._failed_pings.items() if peer in present}
        self._rtts = {peer: rtt_s for peer, rtt_s in self._rtts.items() if peer in present}

    async def _publish(self, models: tuple[ModelStatus, ...]) -> None:
        now = self._transport.wall_time()
        if self._state.number:  # everything is new at the first look
            self._changes.extendleft(find_changes(self._state.models, models, now))
        self._state = SwarmState(self._state.number + 1, now, models, tuple(self._changes))
        async with self._news:
            self._news.notify_all()
