"""What servers say is kept short and read with suspicion."""

import contextlib
import math
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput, LocalProtocolError
from corolla.ids import Fingerprint
from corolla.net.identity import ephemeral
from corolla.net.records import sign_record
from corolla.swarm.announcement import (
    MAX_VALUE_BYTES,
    Announcement,
    AnnouncementRejected,
    ModelEntry,
    announcement_key,
    announcement_keys,
    clean_name,
    decode_announcement,
    decode_model_entry,
    short_peer,
)

FINGERPRINT = Fingerprint("0123456789abcdef" * 2)

HONEST = Announcement(
    state="online",
    start=4,
    end=8,
    num_blocks=12,
    fingerprint=FINGERPRINT,
    model_name="SmolLM2-135M-Instruct",
    dtype="bfloat16",
    quantization="nf4",
    decode_tokens_per_s=120.5,
    prefill_tokens_per_s=4000.0,
    free_cache_tokens=8192,
    queue_s=0.01,
    max_session_tokens=2048,
    adapters=["poet"],
    next_rtts={"KooWnext10": 0.012},
    version="0.1.0",
    name="café 日本 box",
    addresses=["/ip4/127.0.0.1/tcp/1234/p2p/12D3KooWme"],
    announced_at=1_800_000_000.0,
    commit="0123456789abcdef0123456789abcdef01234567",
    inflows={"KooWbefor1": 12_500_000},
    position_bytes=8192,
    moving_to=(0, 4),
)


def with_field(name: str, value: Any) -> bytes:
    """The wire form of HONEST with one field of any kind in it."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(HONEST))
    fields[Announcement.__struct_fields__.index(name)] = value
    return msgspec.msgpack.encode(fields)


def test_an_announcement_comes_back_as_it_was() -> None:
    assert decode_announcement(HONEST.encode()) == HONEST


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    fields = msgspec.msgpack.decode(HONEST.encode())
    assert decode_announcement(msgspec.msgpack.encode([*fields, "new", {"newer": 1}])) == HONEST


def test_fields_at_the_end_may_be_missing() -> None:
    fields = msgspec.msgpack.decode(HONEST.encode())
    required = msgspec.msgpack.encode(fields[: Announcement.__struct_fields__.index("quantization")])
    assert decode_announcement(required).free_cache_tokens == 0


NONSENSE: list[tuple[str, Any]] = [
    ("state", "offline"),
    ("state", 1),
    ("start", -1),
    ("start", 8),
    ("start", 9),
    ("end", 13),
    ("end", 4.5),
    ("num_blocks", 1_000_000),
    ("num_blocks", 7),
    ("fingerprint", "short"),
    ("fingerprint", "0123456789abcde\n" * 2),
    ("model_name", "x" * 65),
    ("model_name", "\x1b[2J"),
    ("name", "two\nlines"),
    ("name", "\u202egnol"),
    ("name", b"bytes"),
    ("version", "\x00"),
    ("dtype", ""),
    ("quantization", "\x07"),
    ("decode_tokens_per_s", -1.0),
    ("decode_tokens_per_s", math.nan),
    ("decode_tokens_per_s", math.inf),
    ("prefill_tokens_per_s", math.nan),
    ("queue_s", math.nan),
    ("queue_s", -0.1),
    ("free_cache_tokens", -1),
    ("free_cache_tokens", 1 << 50),
    ("max_session_tokens", 1 << 40),
    ("adapters", ["x"] * 9),
    ("adapters", ["\r"]),
    ("next_rtts", {"peer": math.nan}),
    ("next_rtts", {"peer": -1.0}),
    ("next_rtts", {"\x1b": 1.0}),
    ("next_rtts", {f"peer{number}": 0.1 for number in range(9)}),
    ("addresses", ["/ip4/\n"]),
    ("addresses", ["x" * 257]),
    ("announced_at", math.nan),
    ("announced_at", -1.0),
    ("announced_at", 1.1e11),
    ("announced_at", math.inf),
    ("commit", "main"),
    ("commit", "0" * 40 + "\n"),
    ("commit", None),
    ("inflows", {"peer": 0}),
    ("inflows", {"peer": -1}),
    ("inflows", {"peer": 1 << 41}),
    ("inflows", {"peer": math.nan}),
    ("inflows", {"peer": 1e6 + 0.5}),
    ("inflows", {"\x1b": 1}),
    ("inflows", {f"peer{number}": 1 for number in range(9)}),
    ("position_bytes", -1),
    ("position_bytes", (1 << 24) + 1),
    ("position_bytes", 0.5),
    ("moving_to", [4, 4]),
    ("moving_to", [8, 13]),
    ("moving_to", [-1, 4]),
    ("moving_to", [0, 4, 8]),
    ("moving_to", "04"),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=lambda part: repr(part)[:30])
def test_nonsense_is_rejected_in_our_own_words(name: str, value: Any) -> None:
    with pytest.raises(AnnouncementRejected) as rejected:
        decode_announcement(with_field(name, value))
    assert str(rejected.value).isprintable()


Anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=80)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=20), inner, max_size=9),
    max_leaves=10,
)


def announced(value: bytes) -> Announcement | None:
    """What these bytes announce; None when they are rejected, which is the only error there is."""
    try:
        return decode_announcement(value)
    except AnnouncementRejected:
        return None


@given(name=st.sampled_from(Announcement.__struct_fields__), value=Anything)
def test_whatever_a_field_holds_the_result_makes_sense(name: str, value: Any) -> None:
    said = announced(with_field(name, value))
    if said is None:
        return
    assert 0 <= said.start < said.end <= said.num_blocks <= 10_000
    numbers = [said.decode_tokens_per_s, said.prefill_tokens_per_s, said.queue_s, *said.next_rtts.values()]
    numbers.append(said.announced_at)  # by how much it may be ahead, only a reader's clock can say (`watch.py`)
    assert all(0 < number < math.inf for number in said.inflows.values())
    assert all(0 <= number < math.inf for number in numbers)
    assert all(
        text.isprintable() for text in [said.name, said.model_name, said.version, *said.next_rtts, *said.inflows]
    )


@given(st.binary(max_size=1024) | Anything.map(msgspec.msgpack.encode))
def test_any_bytes_are_an_announcement_or_are_rejected(value: bytes) -> None:
    said = announced(value)
    assert said is None or isinstance(said, Announcement)
    with contextlib.suppress(AnnouncementRejected):
        assert isinstance(decode_model_entry(value), ModelEntry)


def test_the_fullest_announcement_fits_into_a_record() -> None:
    """Capacities make way first, then round trips, the longest of them before the others, then addresses."""
    peers = [ephemeral().peer for _ in range(8)]
    full = msgspec.structs.replace(
        HONEST,
        model_name="m" * 64,
        name="ñ" * 64,
        adapters=["a" * 28] * 6,
        inflows={short_peer(peer): 1_000_000 for peer in peers},
        next_rtts={short_peer(peer): 0.010 + number / 1000 for number, peer in enumerate(peers)},
        addresses=[f"/ip6/2001:db8::{number}/tcp/12345/p2p/{peers[0]}" for number in range(4)],
    )
    value = full.encode()
    assert len(value) <= MAX_VALUE_BYTES
    said = decode_announcement(value)
    assert said.addresses == full.addresses
    assert not said.inflows
    assert list(said.next_rtts) == [short_peer(peer) for peer in peers[: len(said.next_rtts)]]
    assert 1 <= len(said.next_rtts) < 8
    assert len(sign_record(ephemeral(), announcement_key(FINGERPRINT, peers[0]), value, 1_800_000_600.0)) <= 1024


def test_a_models_servers_spread_over_all_of_its_keys() -> None:
    peers = [ephemeral().peer for _ in range(200)]
    taken = Counter(announcement_key(FINGERPRINT, peer) for peer in peers)
    assert set(taken) == set(announcement_keys(FINGERPRINT))
    assert max(taken.values()) < 100


def test_what_cannot_fit_is_said_before_it_is_published() -> None:
    too_many = msgspec.structs.replace(HONEST, adapters=["日" * 64] * 8)
    with pytest.raises(BadInput, match=str(MAX_VALUE_BYTES)):
        too_many.encode()


def test_a_server_that_would_announce_nonsense_learns_it_at_home() -> None:
    with pytest.raises(LocalProtocolError, match="queue_s"):
        msgspec.structs.replace(HONEST, queue_s=math.nan).encode()


def test_a_model_entry_comes_back_and_nonsense_does_not() -> None:
    entry = ModelEntry(name="SmolLM2", fingerprint=FINGERPRINT, num_blocks=30)
    assert decode_model_entry(entry.encode()) == entry
    for bad in (["", FINGERPRINT, 30], ["a\x1bb", FINGERPRINT, 30], ["a", "short", 30], ["a", FINGERPRINT, 0], {}):
        with pytest.raises(AnnouncementRejected):
            decode_model_entry(msgspec.msgpack.encode(bad))


@given(st.text())
def test_a_clean_name_is_printable_short_and_stays_as_it_is(text: str) -> None:
    cleaned = clean_name(text)
    assert cleaned.isprintable()
    assert len(cleaned) <= 64
    assert clean_name(cleaned) == cleaned


def test_a_clean_name_keeps_what_can_be_read() -> None:
    assert clean_name("  my\tbox\n\x1b[31m of café\u202e ") == "my box [31m of café"


def test_the_slowest_links_are_announced_when_there_is_no_room_for_all() -> None:
    peers = [ephemeral().peer for _ in range(8)]
    full = msgspec.structs.replace(
        HONEST,
        adapters=["a" * 60] * 7,
        next_rtts={short_peer(peer): 0.010 for peer in peers},
        inflows={short_peer(peer): (number + 1) << 20 for number, peer in enumerate(peers)},
    )
    said = decode_announcement(full.encode())
    assert said.next_rtts == full.next_rtts
    assert 1 <= len(said.inflows) < 8
    assert list(said.inflows) == [short_peer(peer) for peer in peers[: len(said.inflows)]]
