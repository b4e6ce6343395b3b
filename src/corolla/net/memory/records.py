"""Records in memory: every peer keeps a shelf, and a record stands on the shelves of a few peers near its key.

As in a Kademlia table, which peers those are follows from hashes, every storing peer checks what it keeps, and a
reader asks those near the key. Checks are those of `net/records.py`, by each peer's own wall clock. `Traffic` counts
what this costs each peer, as on the real network (`net/libp2p/dht.py`): who publishes or reads asks the nearest peers
who is nearest. Then some of them keep the record, and the first time one of them shows it; or those answer that
`net/readings.py` picks. Here everybody knows everybody: the way towards the key is not counted, which in hivemind's
tables of a thousand peers asks four more at most.
"""

import asyncio
import hashlib
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.identity import Identity
from corolla.net.places import OURS, UNKNOWN, Places
from corolla.net.readings import Readings
from corolla.net.records import (
    MAX_LIFETIME_S,
    REPLICAS,
    Record,
    RecordRejected,
    check_times,
    open_record,
    sign_record,
)

ASKED: Final = 20
"""Peers that a search asks, the nearest to the key: hivemind's bucket, and as many neighbours are in each reply."""
REQUEST_BYTES: Final = 120
"""Of a request or a reply without records and neighbours: ids, hashes, framing (hivemind's are about as large)."""
NEIGHBOUR_BYTES: Final = 62
"""Of one neighbour that a reply to a search names: a hash and a peer id."""


@dataclass(slots=True)
class Traffic:
    """What records cost one peer: requests and replies, sent and received, its own and those it answers."""

    messages: int = 0
    num_bytes: int = 0

    def exchange(self, other: "Traffic", num_bytes: int) -> None:
        """One request and its reply, with this many bytes of records or neighbours in one of the two."""
        for side in (self, other):
            side.messages += 2
            side.num_bytes += 2 * REQUEST_BYTES + num_bytes


class Shelf:
    """What one peer keeps for the others: signed blobs by key and publisher."""

    def __init__(self) -> None:
        self._blobs: dict[str, dict[PeerId, tuple[float, bytes]]] = {}
        self._places = Places[str](random.Random(0))  # noqa: S311 (fairness; the same in each run)

    def store(self, key: str, peer: PeerId, blob: bytes, now: float, bringer: "Bringer") -> bool:
        """Keep a blob that is valid at wall time `now` and not older than what is here. False: refused."""
        try:
            record = _verify(key, peer, blob, now)
        except RecordRejected:
            return False
        if peer in self.blobs(key):
            if self._blobs[key][peer][0] > record.expires_at:
                return False
            self._places.renew(key, peer, bringer.group, by_itself=bringer.peer == peer)
        elif not self._find_place(key, peer, bringer.group, now):
            return False
        self._blobs.setdefault(key, {})[peer] = (record.expires_at, blob)
        return True

    def most_under_a_key(self, now: float) -> int:
        """Living records under the fullest key; a key takes `places.MAX_PER_KEY`."""
        living = (sum(expires_at > now for expires_at, _ in under_key.values()) for under_key in self._blobs.values())
        return max(living, default=0)

    def blobs(self, key: str) -> Mapping[PeerId, tuple[float, bytes]]:
        """(expiry, blob) of each publisher under `key`; expired ones may still be among them."""
        return self._blobs.get(key, {})

    def num_bytes(self, key: str) -> int:
        """Of all that lies under `key`: what a reply to a reader carries."""
        return sum(len(blob) for _, blob in self.blobs(key).values())

    def _find_place(self, key: str, peer: PeerId, group: AddressGroup, now: float) -> bool:
        if self._places.is_full(key):
            self._drop_expired(now)
        displaced = self._places.admit(key, peer, group, now)
        for place in displaced or ():
            self._drop(*place)
        return displaced is not None

    def _drop_expired(self, now: float) -> None:
        for key, under_key in list(self._blobs.items()):
            for peer in [peer for peer, (expires_at, _) in under_key.items() if expires_at <= now]:
                self._drop(key, peer)
                self._places.leave(key, peer)

    def _drop(self, key: str, peer: PeerId) -> None:
        del self._blobs[key][peer]
        if not self._blobs[key]:
            del self._blobs[key]


@dataclass(frozen=True, slots=True)
class Bringer:
    """Who asks a peer to keep a record, and from where."""

    peer: PeerId
    group: AddressGroup


Answering = Callable[[], Mapping[PeerId, "MemoryRecords"]]
"""The peers that would answer a request now, without ourselves."""


class MemoryRecords:
    """One peer's access to the table, and its shelf in it."""

    def __init__(
        self,
        identity: Identity,
        *,
        wall_time: Callable[[], float],
        answering: Answering,
        has_met_others: Callable[[], bool],
        round_trip_s: Callable[[PeerId], float],
        group: AddressGroup,
    ) -> None:
        self._identity = identity
        self._as_bringer = Bringer(identity.peer, group)
        self._wall_time = wall_time
        self._answering = answering
        self._has_met_others = has_met_others
        self._round_trip_s = round_trip_s
        self._shelf = Shelf()
        self._has_read_back = False
        self._readings = Readings(random.Random(identity.peer))  # noqa: S311 (fairness; the same in each run)
        self.traffic: Final = Traffic()

    @property
    def most_under_a_key(self) -> int:
        """Living records under the fullest key that this peer keeps."""
        return self._shelf.most_under_a_key(self._wall_time())

    def forget_all(self) -> None:
        """Lose what this peer keeps for others, as after a restart."""
        self._shelf = Shelf()

    async def put(self, key: str, value: bytes, lifetime_s: float) -> bool:
        if not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise BadInput(f"a record lives {lifetime_s:g} s; more than 0 and at most {MAX_LIFETIME_S:g} are possible")
        expires_at = self._wall_time() + lifetime_s
        blob = sign_record(self._identity, key, value, expires_at)
        _SIGNED_HERE.add(key, blob, Record(self._identity.peer, value, expires_at))
        self._shelf.store(key, self._identity.peer, blob, self._wall_time(), Bringer(self._identity.peer, OURS))
        asked = _nearest(key, self._answering())
        if not asked:
            return not self._has_met_others()
        keepers = asked[:REPLICAS]
        await asyncio.sleep(max(self._round_trip_s(keeper._identity.peer) for keeper in keepers))
        for other in asked:
            self.traffic.exchange(other.traffic, NEIGHBOUR_BYTES * len(asked))
        for keeper in keepers:
            self.traffic.exchange(keeper.traffic, len(blob))
        kept = [keeper.keep(key, self._identity.peer, blob, self._as_bringer) for keeper in keepers]
        if any(kept) and not self._has_read_back:
            self._has_read_back = True
            self.traffic.exchange(keepers[0].traffic, keepers[0]._shelf.num_bytes(key))
        return any(kept)

    async def get(self, key: str) -> list[Record]:
        near = _nearest(key, self._answering())
        if near:
            await asyncio.sleep(max(self._round_trip_s(other._identity.peer) for other in near))
        for other in near:
            self.traffic.exchange(other.traffic, NEIGHBOUR_BYTES * len(near))
        ours, target = self._shelf.blobs(key), _hash(key)
        num_nearer = sum(_hash(other._identity.peer) ^ target < _hash(self._identity.peer) ^ target for other in near)
        asked = self._readings.choose_first(key, near, are_we_near=num_nearer < REPLICAS)
        answers = [self._ask(other, key, len(near)) for other in asked]
        if len(asked) < len(near) and self._readings.is_doubtful(
            key, [self._living(answer) for answer in answers], ours
        ):
            answers += [self._ask(other, key, len(near)) for other in near if other not in asked]
        newest = dict(ours)
        for answer in answers:
            for peer, (expires_at, blob) in answer.items():
                if peer not in newest or newest[peer][0] < expires_at:
                    newest[peer] = (expires_at, blob)
        if near:
            self._readings.note(key, self._living(newest))
        return self._verified(key, newest)

    def keep(self, key: str, peer: PeerId, blob: bytes, bringer: Bringer | None = None) -> bool:
        """Put somebody's blob on this peer's shelf, as if they (or `bringer`) had asked. False: refused."""
        return self._shelf.store(key, peer, blob, self._wall_time(), bringer or Bringer(peer, UNKNOWN))

    def _ask(self, other: "MemoryRecords", key: str, num_neighbours: int) -> Mapping[PeerId, tuple[float, bytes]]:
        self.traffic.exchange(other.traffic, NEIGHBOUR_BYTES * num_neighbours + other._shelf.num_bytes(key))
        return other._shelf.blobs(key)

    def _living(self, answer: Mapping[PeerId, tuple[float, bytes]]) -> list[PeerId]:
        now = self._wall_time()
        return [peer for peer, (expires_at, _) in answer.items() if expires_at > now]

    def _verified(self, key: str, blobs: Mapping[PeerId, tuple[float, bytes]]) -> list[Record]:
        now = self._wall_time()
        records: list[Record] = []
        for peer, (_, blob) in blobs.items():
            try:
                records.append(_verify(key, peer, blob, now))
            except RecordRejected:
                continue  # expired meanwhile, or its keeper's clock let it pass and ours does not
        return records


_open = lru_cache(maxsize=1 << 16)(open_record)
"""A thousand readers check the same thousand signatures; the real network's peers remember them just so."""


class _SignedHere:
    """Records that peers of this process have just signed: their first readers need not check that they did.

    A tenth of what a random life takes (`apps/sim/chaos.py`). A blob that anyone else made, or changed, is not here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: dict[tuple[str, bytes], Record] = {}

    def add(self, key: str, blob: bytes, record: Record) -> None:
        if len(self._records) >= self._most:
            self._records.clear()  # whoever asks for those then checks for himself
        self._records[key, blob] = record

    def find(self, key: str, peer: PeerId, blob: bytes) -> Record | None:
        record = self._records.get((key, blob))
        return record if record is not None and record.peer == peer else None


_SIGNED_HERE: Final = _SignedHere(1 << 14)


def _verify(key: str, peer: PeerId, blob: bytes, now: float) -> Record:
    """`verify_record`, quicker."""
    record = _SIGNED_HERE.find(key, peer, blob) or _open(key, peer, blob)
    check_times(record, now)
    if record.expires_at <= now:
        raise RecordRejected("expired", f"{now - record.expires_at:.1f} s ago")
    return record


def _nearest(key: str, peers: Mapping[PeerId, MemoryRecords]) -> list[MemoryRecords]:
    """The peers whose hashes are nearest to the key's, the nearest first (Kademlia §2.3)."""
    target = _hash(key)
    return [peers[peer] for peer in heapq.nsmallest(ASKED, peers, key=lambda peer: _hash(peer) ^ target)]


@lru_cache(maxsize=1 << 16)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
