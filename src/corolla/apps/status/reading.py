"""Asks a swarm who serves what: the models of its index, a view of each, and round trips from here."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.errors import HopFailed, NoRoute
from corolla.ids import Fingerprint, PeerId
from corolla.net.streams import Transport
from corolla.swarm.announcement import MODELS_KEY, ModelEntry
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher, list_models

log = logging.getLogger(__name__)

PING_TIMEOUT_S: Final = 2.0
PINGS: Final = 2
"""The first may have to dial: the least of them counts."""
MAX_PINGED: Final = 64


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of the swarm and its servers, with round trips as measured from here."""

    entry: ModelEntry
    view: View
    silent: frozenset[PeerId] = frozenset()
    """Announced, but they do not answer here: shown, not counted on."""
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Announcements that were dropped, by why."""

    @property
    def counted(self) -> View:
        """The view that health and coverage are told from."""
        return self.view.without(self.silent) if self.silent else self.view


async def read_swarm(transport: Transport, wanted: Sequence[str], *, may_lack: bool = False) -> list[ModelStatus]:
    """The status of the wanted models (none named: all). Raises NoRoute when a named one is not served.

    With `may_lack` that one is left out (`unserved` names it).

    A server that died is announced for minutes. One that twice gives no answer here is not counted on, and its round
    trip is infinite, so that routes avoid it.

    The index of models outlives the last server of one by minutes: what nobody serves any more is left out.
    """
    rejected = Counter[str]()
    listed = list_models(await transport.records.get(MODELS_KEY), rejected)
    watchers = {entry.fingerprint: Watcher(transport, Fingerprint(entry.fingerprint)) for entry in listed}
    await asyncio.gather(*(watcher.refresh() for watcher in watchers.values()))
    view_of = {fingerprint: watcher.view for fingerprint, watcher in watchers.items() if watcher.view.servers}
    for fingerprint in watchers.keys() - view_of.keys():
        rejected += watchers[fingerprint].rejected
    if rejected:
        log.warning("records of no model that is shown were dropped", extra={"by_reason": dict(rejected)})
    served = [entry for entry in listed if entry.fingerprint in view_of]
    if not may_lack and (lacking := unserved(served, wanted)):
        names = ", ".join(entry.name for entry in served) or "nothing"
        raise NoRoute(f"nobody serves {lacking[0]} in this swarm; served: {names}")
    entries = choose(served, wanted)
    views = [view_of[entry.fingerprint] for entry in entries]
    peers = list(dict.fromkeys(peer for view in views for peer in view.servers))[:MAX_PINGED]
    rtts = await ping_all(transport, peers)
    again = await ping_all(transport, [peer for peer in peers if peer not in rtts])
    rtts |= {peer: again.get(peer, math.inf) for peer in peers if peer not in rtts}
    silent = frozenset(peer for peer, rtt_s in rtts.items() if math.isinf(rtt_s))
    return [
        ModelStatus(
            entry, view.with_rtts(rtts), silent & view.servers.keys(), watchers[entry.fingerprint].rejected_last
        )
        for entry, view in zip(entries, views, strict=True)
    ]


def unserved(served: Sequence[ModelEntry], wanted: Sequence[str]) -> list[str]:
    """What the user named, by name or beginning of the fingerprint, that is not among these."""
    return [name for name in wanted if not any(_is_called(entry, name) for entry in served)]


def choose(served: Sequence[ModelEntry], wanted: Sequence[str]) -> list[ModelEntry]:
    """The entries that the user named; none named: all."""
    return [entry for entry in served if not wanted or any(_is_called(entry, name) for name in wanted)]


def _is_called(entry: ModelEntry, name: str) -> bool:
    return bool(name) and (entry.name == name or entry.fingerprint.startswith(name))


async def ping_all(transport: Transport, peers: Sequence[PeerId]) -> dict[PeerId, float]:
    """Round trips in seconds of those that answer in time."""

    async def ping(peer: PeerId) -> float | None:
        try:
            return min([await transport.ping(peer, timeout_s=PING_TIMEOUT_S) for _ in range(PINGS)])
        except HopFailed:
            return None

    asked = list(dict.fromkeys(peers))[:MAX_PINGED]
    answers = await asyncio.gather(*(ping(peer) for peer in asked))
    return {peer: rtt_s for peer, rtt_s in zip(asked, answers, strict=True) if rtt_s is not None}
