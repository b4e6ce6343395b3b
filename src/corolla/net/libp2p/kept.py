"""The records that this peer keeps for others: a bounded stand-in for the storage of hivemind's DHT node.

hivemind's own has no bounds, remembers every repeated store until it expires, and hands out its insides, which a
search then changes. This one holds at most 500 records a key (a reply must stay below 4 MiB), shares the places out
by where records come from (`net/places.py`), refuses plain values and repeats, and gives copies. What arrives here
has been checked (`check.py`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from corolla.clock import WallClock
from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.libp2p.lean import hivemind
from corolla.net.places import MAX_IN_ALL, MAX_PER_KEY, OURS, Places

_SWEEP_S: Final = 1.0
"""Between two looks at all keys for what has expired: under a flood each refused store would look."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who brought a record, and from where."""

    peer: PeerId
    group: AddressGroup


@dataclass(frozen=True, slots=True)
class Kept:
    """One peer's encoded blob."""

    value: bytes
    expires_at: float


@dataclass(frozen=True, slots=True)
class Found:
    """All that is kept under a key, in the form that hivemind's node passes on."""

    value: Any
    expiration_time: float

    def __iter__(self) -> Iterator[Any]:
        return iter((self.value, self.expiration_time))


class KeptRecords:
    """What hivemind's node stores into and reads from; its names and arguments are hivemind's."""

    def __init__(
        self,
        now: WallClock,
        rng: random.Random,
        source: Callable[[], Source | None],
        *,
        max_per_key: int = MAX_PER_KEY,
        max_in_all: int = MAX_IN_ALL,
    ) -> None:
        """`source`: who brings what is being stored; None: we ourselves."""
        self._now = now
        self._source = source
        self._swept_at = float("-inf")
        self._keys: dict[int, dict[str, Kept]] = {}
        self._places = Places[int](rng, max_per_key=max_per_key, max_in_all=max_in_all)

    def store(self, key: int, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Plain values, which name no publisher, are not kept."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: int, subkey: str, value: bytes, expiration_time: float) -> bool:
        """True when it is kept now: newer than what was there, and there is room."""
        if expiration_time <= self._now():
            return False
        old = self._keys.get(key, {}).get(subkey)
        if old is not None and old.expires_at >= expiration_time:
            return old == Kept(value, expiration_time)
        if not self._find_place(key, PeerId(subkey), is_new=old is None):
            return False
        self._keys.setdefault(key, {})[subkey] = Kept(value, expiration_time)
        return True

    def get(self, key: int) -> Found | None:
        self._drop_expired(key)
        kept = self._keys.get(key)
        return _found(kept) if kept else None

    def items(self) -> Iterator[tuple[int, Found]]:
        for key in list(self._keys):
            found = self.get(key)
            if found is not None:
                yield key, found

    def __contains__(self, key: int) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._places)

    def _find_place(self, key: int, peer: PeerId, *, is_new: bool) -> bool:
        source = self._source()
        group = OURS if source is None else source.group
        if not is_new:
            self._places.renew(key, peer, group, by_itself=source is None or source.peer == peer)
            return True
        if self._places.is_full(key):
            self._sweep()
        displaced = self._places.admit(key, peer, group, self._now())
        if displaced is None:
            return False
        for other, loser in displaced:
            self._drop(other, loser)
        return True

    def _sweep(self) -> None:
        now = self._now()
        if abs(now - self._swept_at) >= _SWEEP_S:  # a wall clock may jump back
            self._swept_at = now
            for key in list(self._keys):
                self._drop_expired(key)

    def _drop_expired(self, key: int) -> None:
        kept, now = self._keys.get(key, {}), self._now()
        for subkey in [subkey for subkey, record in kept.items() if record.expires_at <= now]:
            self._drop(key, subkey)
            self._places.leave(key, PeerId(subkey))

    def _drop(self, key: int, subkey: str) -> None:
        del self._keys[key][subkey]
        if not self._keys[key]:
            del self._keys[key]


def _found(kept: dict[str, Kept]) -> Found:
    dictionary = hivemind().DictionaryDHTValue()
    with dictionary.freeze():  # clocks differ: what has expired by hivemind's may be alive by ours
        for subkey, record in kept.items():
            dictionary.store(subkey, record.value, record.expires_at)
    return Found(dictionary, max(record.expires_at for record in kept.values()))
