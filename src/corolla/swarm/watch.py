"""Keeps a view of one model's servers fresh, from the records that they publish. One bad record costs only itself.

Nor does a reading that fails cost the view. A record gives way only to one that expires later, never to nothing: so a
key under which nothing is found, not even of a server that has left, was not read, whatever the network calls it, and
its servers stay until their announcements expire. Which bootstrap peer is there does not matter: records lie with all
peers, and the transport rejoins by itself.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from corolla.clock import loop_time
from corolla.ids import Fingerprint, PeerId, short
from corolla.net.records import CLOCK_SKEW_S, Record
from corolla.net.streams import Transport
from corolla.swarm.announcement import (
    AnnouncementRejected,
    ModelEntry,
    announcement_keys,
    decode_announcement,
    decode_model_entry,
)
from corolla.swarm.view import ServerView, View

log = logging.getLogger(__name__)

REPORTED_SKEW_S = 5.0
"""Less says nothing: publishing and reading take a while too."""
MAX_REPORTED_PEERS = 1000


class Watcher:
    """Reads the announcements of one model into `view`."""

    def __init__(self, transport: Transport, fingerprint: Fingerprint, *, num_blocks: int | None = None) -> None:
        """`num_blocks`: of the model, for whoever has its files. Else most servers' word counts, and identities cost
        nothing: a crowd that announces another depth would hide every real server."""
        self._transport = transport
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self._view = View(num_blocks or 0)
        self._under: dict[str, list[ServerView]] = {}
        """What each key had when it was last read."""
        self.rejected: Counter[str] = Counter()
        """How many records were dropped since the start, by reason; one that is still there, at each reading."""
        self.rejected_last: Counter[str] = Counter()
        """The same of the last reading alone."""
        self._read_at: float | None = None
        self._announced_at: dict[PeerId, float] = {}
        self._reported_skew: set[PeerId] = set()

    @property
    def view(self) -> View:
        """As last read; without servers before the first reading."""
        return self._view

    @property
    def read_at(self) -> float | None:
        """When all keys were last read, by the event loop's clock."""
        return self._read_at

    async def refresh(self) -> View:
        """Read the swarm's announcements now. Bounded by the records' own bound; never raises for what peers say."""
        keys = announcement_keys(self._fingerprint)
        found = await asyncio.gather(*(self._transport.records.get(key) for key in keys))
        before, num_unread = self.rejected.copy(), 0
        for key, records in zip(keys, found, strict=True):
            unread = self._unread(key, records)
            self._under[key] = unread + [server for record in records if (server := self._read(record)) is not None]
            num_unread += len(unread)
        newest = list(_newest(server for servers in self._under.values() for server in servers))
        view = View.of(newest, num_blocks=self._num_blocks)
        self._count_rejected("another number of blocks", len(newest) - len(view.servers))
        self.rejected_last = self.rejected - before
        self._report_skews(view)
        if num_unread:
            log.info("a key was not read; its servers stay until they expire", extra={"num": num_unread})
        else:
            self._read_at = loop_time()
        self._view = view
        return view

    async def keep_fresh(self, period_s: float) -> None:
        """Refresh now and every `period_s`, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(period_s)

    def _unread(self, key: str, records: Sequence[Record]) -> list[ServerView]:
        """The living servers of a key that has only our own record, or none: nobody else has answered."""
        peers = {record.peer for record in records}
        if peers - {self._transport.peer}:
            return []
        now = self._transport.wall_time()
        return [server for server in self._under.get(key, ()) if server.expires_at > now and server.peer not in peers]

    def _read(self, record: Record) -> ServerView | None:
        try:
            said = decode_announcement(record.value)
        except AnnouncementRejected as fault:
            self._count_rejected(str(fault), 1)
            return None
        if said.fingerprint != self._fingerprint:
            self._count_rejected("another model's announcement", 1)
            return None
        if (ahead_s := said.announced_at - self._transport.wall_time()) > CLOCK_SKEW_S:
            self._count_rejected("dated in the future", 1)
            self._report_skew(record.peer, ahead_s)
            return None
        if said.state == "left":
            return None
        return ServerView(record.peer, said, record.expires_at)

    def _count_rejected(self, reason: str, times: int) -> None:
        if times:
            self.rejected[reason] += times
            log.debug("announcements rejected", extra={"reason": reason, "times": times})

    def _report_skews(self, view: View) -> None:
        """Compare each new announcement's date with our clock: it was published since our last whole reading."""
        now = self._transport.wall_time()
        since_s = None if self._read_at is None else loop_time() - self._read_at
        for peer, server in view.servers.items():
            announced_at = server.announcement.announced_at
            known_at = self._announced_at.get(peer)
            if announced_at and announced_at != known_at:
                ahead_s = clock_ahead_s(announced_at, now, since_s if known_at is not None else None)
                self._report_skew(peer, ahead_s)
        self._announced_at = {peer: server.announcement.announced_at for peer, server in view.servers.items()}

    def _report_skew(self, peer: PeerId, ahead_s: float) -> None:
        if abs(ahead_s) < REPORTED_SKEW_S or peer in self._reported_skew:
            return
        if len(self._reported_skew) < MAX_REPORTED_PEERS:
            self._reported_skew.add(peer)
            log.warning(
                "a server's clock differs from ours; up to a minute does no harm, one further ahead is left out",
                extra={"peer": short(peer), "ahead_s": round(ahead_s, 1)},
            )


def _newest(servers: Iterable[ServerView]) -> Iterable[ServerView]:
    """Of each peer the announcement that lasts longest: it may have published under a key that is not its own."""
    newest: dict[PeerId, ServerView] = {}
    for server in servers:
        if server.peer not in newest or server.expires_at > newest[server.peer].expires_at:
            newest[server.peer] = server
    return newest.values()


def clock_ahead_s(announced_at: float, now: float, unseen_s: float | None) -> float:
    """By how much at least the publisher's clock is ahead of ours (negative: behind); 0 when they may agree.

    The announcement was published at most `unseen_s` before `now` (None: nobody knows how long before).
    """
    if announced_at > now:
        return announced_at - now
    if unseen_s is not None and announced_at < now - unseen_s:
        return announced_at - (now - unseen_s)
    return 0.0


def list_models(records: Iterable[Record], rejected: Counter[str] | None = None) -> list[ModelEntry]:
    """The models in these index records, each once, under the name that most of its servers use; sorted by name.

    `rejected`: counts those that make no sense, by reason.
    """
    votes: dict[Fingerprint, Counter[tuple[str, int]]] = {}
    for record in records:
        try:
            entry = decode_model_entry(record.value)
        except AnnouncementRejected as fault:
            if rejected is not None:
                rejected[str(fault)] += 1
            log.debug("index record rejected", extra={"reason": str(fault)})
            continue
        votes.setdefault(entry.fingerprint, Counter())[entry.name, entry.num_blocks] += 1
    entries: list[ModelEntry] = []
    for fingerprint, names in votes.items():
        name, num_blocks = min(names, key=lambda named: (-names[named], named))
        entries.append(ModelEntry(name=name, fingerprint=fingerprint, num_blocks=num_blocks))
    return sorted(entries, key=lambda entry: (entry.name, entry.fingerprint))
