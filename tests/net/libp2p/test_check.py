"""What a storing peer and a reader let through, without a network: signatures, expiries, bounds."""

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.identity import Identity, from_seed
from corolla.net.libp2p.check import RecordCheck, harden
from corolla.net.libp2p.kept import KeptRecords, Source
from corolla.net.libp2p.lean import hivemind
from corolla.net.places import MAX_PER_KEY
from corolla.net.records import MAX_LIFETIME_S, sign_record

ALICE, MALLORY = from_seed(b"a" * 32), from_seed(b"m" * 32)
KEY = "corolla/1/test"


@dataclass
class Clock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class DhtRecord:
    """As hivemind hands it to a validator."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def stranger() -> Source:
    return Source(MALLORY.peer, AddressGroup("192.0.2.0/24"))


def keep(clock: Clock, **bounds: int) -> KeptRecords:
    return KeptRecords(clock, random.Random(0), stranger, **bounds)


def key_hash(key: str) -> bytes:
    return hivemind().DHTID.generate(source=key).to_bytes()


def record(identity: Identity, expires_at: float, *, key: str = KEY, peer: PeerId | None = None) -> DhtRecord:
    blob = sign_record(identity, key, b"span", expires_at)
    subkey = msgspec.msgpack.encode(identity.peer if peer is None else peer)
    return DhtRecord(key_hash(key), subkey, msgspec.msgpack.encode(blob), expires_at)


def test_an_honest_record_passes_and_an_expired_one_harms_nobody() -> None:
    clock = Clock()
    check = RecordCheck(clock)
    honest = record(ALICE, clock.now + 60)
    assert check.validate(honest)
    clock.now += 90
    assert check.validate(honest)


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(record(MALLORY, 1_800_000_060.0, peer=ALICE.peer), id="another's name"),
        pytest.param(record(MALLORY, 1_800_000_060.0, peer=PeerId("nobody")), id="no peer"),
        pytest.param(record(ALICE, 1_800_000_000.0 + 10 * 365 * 86400), id="ten years"),
        pytest.param(
            DhtRecord(key_hash(KEY), msgspec.msgpack.encode(ALICE.peer), b"unsigned", 1_800_000_060.0), id="unsigned"
        ),
        pytest.param(DhtRecord(key_hash(KEY), b"\xc0", b"\xc4\x01x", 1_800_000_060.0), id="a plain value"),
        pytest.param(DhtRecord(key_hash(KEY), b"\xff\xff", b"", 1.0), id="noise"),
        pytest.param(DhtRecord(key_hash(KEY), b"\xa1x", b"\xc6" + bytes(5_000_000), 1.0), id="five megabytes"),
    ],
)
def test_a_forged_record_is_refused(forged: DhtRecord) -> None:
    refused = Counter[str]()
    assert not RecordCheck(Clock(), refused).validate(forged)
    assert sum(refused.values()) == 1  # for metrics


def test_a_record_moved_to_another_key_is_refused() -> None:
    moved = record(ALICE, 1_800_000_060.0)
    moved.key = key_hash("corolla/1/other")
    assert not RecordCheck(Clock()).validate(moved)


def test_the_dht_cannot_be_told_to_keep_a_record_for_longer_than_was_signed() -> None:
    prolonged = record(ALICE, 1_800_000_060.0)
    prolonged.expiration_time += 1e8
    assert not RecordCheck(Clock()).validate(prolonged)


class Protocol:
    """The parts of hivemind's protocol that are hardened, with a real check behind."""

    def __init__(self, clock: Clock) -> None:
        self._check = RecordCheck(clock)
        self.storage: Any = None
        self.cache: Any = None
        self.serializer = _Packer
        harden(self, clock, random.Random(0), stranger)

    def _validate_record(self, key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        return self._check.validate(DhtRecord(key, subkey, value, expires_at))

    def _validate_dictionary(self, key: bytes, dictionary: Any) -> bool:
        raise AssertionError("replaced when hardened")

    def judge(self, dictionary: Any) -> list[str]:
        assert self._validate_dictionary(key_hash(KEY), dictionary)
        with dictionary.freeze():
            return [subkey for subkey, _ in dictionary.items()]


class _Packer:
    dumps = staticmethod(msgspec.msgpack.encode)


def test_one_bad_record_in_a_reply_does_not_void_the_good_ones() -> None:
    """Mallory stores a record that just passes where the clock is a little ahead of the reader's."""
    clock = Clock(time.time())
    reply = hivemind().DictionaryDHTValue()
    for identity, expires_at in ((ALICE, clock.now + 60), (MALLORY, clock.now + MAX_LIFETIME_S + 61)):
        reply.store(identity.peer, record(identity, expires_at).value, expires_at)
    assert Protocol(clock).judge(reply) == [ALICE.peer]


def test_nothing_is_kept_as_cache_where_it_would_hide_what_is_stored() -> None:
    protocol = Protocol(Clock())
    assert not protocol.cache.store_subkey(1, "peer", b"x", 1_800_000_060.0)
    assert protocol.cache.get(1) is None
    assert 1 not in protocol.cache


# What is kept


def entries(records: KeptRecords, key: int) -> dict[str, bytes]:
    found = records.get(key)
    if found is None:
        return {}
    with found.value.freeze():
        return {subkey: entry.value for subkey, entry in found.value.items()}


def test_the_newest_record_of_each_peer_is_kept_until_it_expires() -> None:
    clock = Clock()
    records = keep(clock)
    assert records.store_subkey(1, "a", b"old", clock.now + 10)
    assert records.store_subkey(1, "a", b"new", clock.now + 20)
    assert not records.store_subkey(1, "a", b"old", clock.now + 10)
    assert not records.store_subkey(1, "a", b"equally old, other", clock.now + 20)
    assert records.store_subkey(1, "b", b"brief", clock.now + 5)
    assert entries(records, 1) == {"a": b"new", "b": b"brief"}
    clock.now += 6
    assert entries(records, 1) == {"a": b"new"}
    clock.now += 20
    assert entries(records, 1) == {}
    assert len(records) == 0
    assert not records.store_subkey(1, "a", b"dead on arrival", clock.now)


def test_storing_again_what_is_kept_says_yes_and_takes_no_room() -> None:
    clock = Clock()
    records = keep(clock)
    for _ in range(1000):
        assert records.store(1, b"same", clock.now + 10, subkey="a")
    assert len(records) == 1


def test_plain_values_are_not_kept() -> None:
    clock = Clock()
    records = keep(clock)
    assert not records.store(1, b"anything", clock.now + 10)
    assert records.get(1) is None


def test_a_key_and_the_whole_have_bounds_and_expiry_makes_room() -> None:
    clock = Clock()
    records = keep(clock, max_in_all=MAX_PER_KEY + 2)
    for number in range(MAX_PER_KEY):
        assert records.store_subkey(1, f"peer{number}", b"x", clock.now + 10)
    assert records.store_subkey(1, "peer0", b"refreshed", clock.now + 20)
    for number in range(100):
        records.store_subkey(1, f"one more {number}", b"x", clock.now + 10)
    assert len(entries(records, 1)) == MAX_PER_KEY
    assert entries(records, 1)["peer0"] == b"refreshed"
    assert records.store_subkey(2, "a", b"x", clock.now + 10)
    assert records.store_subkey(2, "b", b"x", clock.now + 10)
    assert not records.store_subkey(3, "a", b"x", clock.now + 10)
    assert len(records) == MAX_PER_KEY + 2
    clock.now += 11
    assert records.store_subkey(1, "one more", b"x", clock.now + 10)
    assert records.store_subkey(3, "a", b"x", clock.now + 10)
    assert len(records) == 3


def test_a_search_that_adds_to_what_it_was_given_changes_nothing_here() -> None:
    clock = Clock(time.time())
    records = keep(clock)
    records.store_subkey(1, "a", b"x", clock.now + 10)
    found = records.get(1)
    assert found is not None
    found.value.store("b", b"from another peer", clock.now + 10)
    assert entries(records, 1) == {"a": b"x"}
    assert [key for key, _ in records.items()] == [1]
