"""Who gets the places for records that a peer keeps for others, when there are more records than places. Pure.

Identities cost nothing: one machine can fill a key with validly signed records. So places are shared by where a
record came from (`net/groups.py`). While there is room everybody gets a place, and who has one may always renew its
record. When a key (or the whole) is full, a newcomer takes a place of the address group that holds most, at random
among the records there that were never renewed, then among all; and each group may do so only slowly:

- a flood from one group displaces itself: others lose none of what they hold, and newcomers from elsewhere get in;
- a newcomer from the flooding group itself gets in too, and stays until it is renewed with probability 0.9;
- a flood from as many groups as there are places wins; a swarm key is the answer to that.

A record brought by another peer than its own (hivemind hands records on to new neighbours) counts for who brought
it, until its own peer renews it.
"""

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from corolla.ids import PeerId
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import AddressGroup

MAX_PER_KEY: Final = 500
"""One reply of the DHT has at most 4 MiB, a record 1 KB."""
MAX_IN_ALL: Final = 20_000
"""At 1 KB each this is the most memory that strangers can take: 20 MB."""
DISPLACING: Final = Rate(per_s=1, burst=16)
"""Places that one group may take from others. At one a second, a newcomer that must be renewed within 45 s is
displaced by the rest of its own group with probability 45/400."""

UNKNOWN: Final = AddressGroup("unknown")
OURS: Final = AddressGroup("ours")
"""Of what this peer publishes itself: never displaced."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Holder:
    group: AddressGroup
    was_renewed: bool


class Places(Generic[Key]):
    """The occupied places."""

    def __init__(self, rng: random.Random, *, max_per_key: int = MAX_PER_KEY, max_in_all: int = MAX_IN_ALL) -> None:
        self._rng = rng
        self._max_per_key = max_per_key
        self._max_in_all = max_in_all
        self._keys: dict[Key, dict[PeerId, _Holder]] = {}
        self._num_taken = 0
        self._displacing = Buckets(DISPLACING)

    def __len__(self) -> int:
        return self._num_taken

    def is_full(self, key: Key) -> bool:
        """Whether a newcomer under this key must displace somebody."""
        return self._num_taken >= self._max_in_all or len(self._keys.get(key, ())) >= self._max_per_key

    def renew(self, key: Key, peer: PeerId, group: AddressGroup, *, by_itself: bool) -> None:
        """The peer's record was replaced by a newer one."""
        old = self._keys[key][peer]
        self._keys[key][peer] = _Holder(group if by_itself else old.group, was_renewed=True)

    def admit(self, key: Key, peer: PeerId, group: AddressGroup, now: float) -> Sequence[tuple[Key, PeerId]] | None:
        """The places that were taken from others to make room for this newcomer; None when it gets none."""
        displaced: list[tuple[Key, PeerId]] = []
        if self.is_full(key):
            victim = self._victim(key, group) if self._displacing.take(group, now) else None
            if victim is None:
                return None
            self.leave(*victim)
            displaced.append(victim)
        self._num_taken += 1
        self._keys.setdefault(key, {})[peer] = _Holder(group, was_renewed=False)
        return displaced

    def leave(self, key: Key, peer: PeerId) -> None:
        """The record expired, or lost its place."""
        del self._keys[key][peer]
        if not self._keys[key]:
            del self._keys[key]
        self._num_taken -= 1

    def _victim(self, key: Key, newcomer: AddressGroup) -> tuple[Key, PeerId] | None:
        """Somebody of the groups that hold most: under the key if that is full, else anywhere."""
        is_full_key = len(self._keys.get(key, ())) >= self._max_per_key
        places = {
            (other, peer): holder
            for other in ([key] if is_full_key else self._keys)
            for peer, holder in self._keys[other].items()
            if holder.group != OURS
        }
        held = Counter(holder.group for holder in places.values())
        most = max(held.values(), default=0)
        largest = {newcomer} if held[newcomer] == most else {group for group, count in held.items() if count == most}
        theirs = [place for place, holder in places.items() if holder.group in largest]
        fresh = [place for place in theirs if not places[place].was_renewed]
        return self._rng.choice(fresh or theirs) if theirs else None
