"""The records that this peer keeps for others: a bounded stand-in for the storage of hivemind's DHT node.

hivemind's own has no bounds, remembers every repeated store until it expires, and hands out its insides, which a
search then changes. This one holds at most 500 records a key (a reply must stay below 4 MiB), refuses plain values
and repeats, and gives copies. What arrives here has been checked (`dht.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from corolla.clock import WallClock
from corolla.net.libp2p.lean import hivemind

MAX_RECORDS_PER_KEY: Final = 500
MAX_RECORDS: Final = 20_000
"""At 1 KB each this is the most memory that strangers can take: 20 MB."""


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

    def __init__(self, now: WallClock, *, max_records: int = MAX_RECORDS) -> None:
        self._now = now
        self._max_records = max_records
        self._keys: dict[int, dict[str, Kept]] = {}
        self._num_records = 0

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
        if old is None and not self._has_room(key):
            return False
        self._keys.setdefault(key, {})[subkey] = Kept(value, expiration_time)
        self._num_records += old is None
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
        return self._num_records

    def _has_room(self, key: int) -> bool:
        if self._num_records >= self._max_records:
            for other in list(self._keys):
                self._drop_expired(other)
        elif len(self._keys.get(key, ())) >= MAX_RECORDS_PER_KEY:
            self._drop_expired(key)
        return self._num_records < self._max_records and len(self._keys.get(key, ())) < MAX_RECORDS_PER_KEY

    def _drop_expired(self, key: int) -> None:
        kept, now = self._keys.get(key, {}), self._now()
        for subkey in [subkey for subkey, record in kept.items() if record.expires_at <= now]:
            del kept[subkey]
            self._num_records -= 1
        if not kept:
            self._keys.pop(key, None)


def _found(kept: dict[str, Kept]) -> Found:
    dictionary = hivemind().DictionaryDHTValue()
    with dictionary.freeze():  # clocks differ: what has expired by hivemind's may be alive by ours
        for subkey, record in kept.items():
            dictionary.store(subkey, record.value, record.expires_at)
    return Found(dictionary, max(record.expires_at for record in kept.values()))
