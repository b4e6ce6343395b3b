"""Signed records: whatever is changed, moved, borrowed or overlong is refused, and says why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import from_seed
from corolla.net.records import (
    CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    MAX_RECORD_BYTES,
    Flaw,
    Record,
    RecordRejected,
    claimed_key,
    sign_record,
    verify_record,
)

ALICE, MALLORY = from_seed(b"a" * 32), from_seed(b"m" * 32)
KEY = "corolla/1/0123456789abcdef0123456789abcdef"
NOW = 1_800_000_000.0


def flaw_of(key: str, peer: PeerId, blob: bytes, now: float = NOW) -> Flaw:
    with pytest.raises(RecordRejected) as caught:
        verify_record(key, peer, blob, now)
    return caught.value.flaw


@given(st.text(max_size=60), st.binary(max_size=600), st.floats(min_value=0.1, max_value=MAX_LIFETIME_S))
def test_what_was_signed_is_what_is_read(key: str, value: bytes, lifetime_s: float) -> None:
    blob = sign_record(ALICE, key, value, NOW + lifetime_s)
    assert verify_record(key, ALICE.peer, blob, NOW) == Record(ALICE.peer, value, NOW + lifetime_s)
    assert claimed_key(blob) == key


def test_no_byte_can_be_changed() -> None:
    blob = sign_record(ALICE, KEY, b"span 0:8", NOW + 180)
    for at in range(len(blob)):
        for flip in (0x01, 0x80, 0xFF):
            forged = bytearray(blob)
            forged[at] ^= flip
            flaw_of(KEY, ALICE.peer, bytes(forged))


def test_no_byte_can_be_added_or_taken() -> None:
    blob = sign_record(ALICE, KEY, b"span 0:8", NOW + 180)
    for end in range(len(blob)):
        flaw_of(KEY, ALICE.peer, blob[:end])
    assert flaw_of(KEY, ALICE.peer, blob + b"\x00") == "bad signature"


@given(st.binary(max_size=1100))
def test_noise_is_refused(blob: bytes) -> None:
    flaw_of(KEY, ALICE.peer, blob)


def test_nobody_speaks_for_another_peer() -> None:
    blob = sign_record(MALLORY, KEY, b"span 0:8", NOW + 180)
    assert flaw_of(KEY, ALICE.peer, blob) == "bad signature"
    assert flaw_of(KEY, PeerId("QmNotAnEd25519Peer"), blob) == "wrong peer"


def test_a_record_cannot_be_replayed_under_another_key() -> None:
    blob = sign_record(ALICE, KEY, b"span 0:8", NOW + 180)
    assert flaw_of(KEY + "0", ALICE.peer, blob) == "wrong key"


def test_other_signatures_of_the_same_peer_are_no_records() -> None:
    blob = sign_record(ALICE, KEY, b"span 0:8", NOW + 180)
    head, value = blob[: -64 - 8], blob[-8:]
    assert flaw_of(KEY, ALICE.peer, head + ALICE.sign(head + value) + value) == "bad signature"


def test_ten_years_are_too_long() -> None:
    blob = sign_record(ALICE, KEY, b"forever", NOW + 10 * 365 * 86400)
    assert flaw_of(KEY, ALICE.peer, blob) == "expires too late"


def test_lifetime_is_bounded_with_room_for_clock_skew() -> None:
    longest = sign_record(ALICE, KEY, b"x", NOW + MAX_LIFETIME_S)
    assert verify_record(KEY, ALICE.peer, longest, NOW - CLOCK_SKEW_S).value == b"x"
    assert flaw_of(KEY, ALICE.peer, longest, NOW - CLOCK_SKEW_S - 1) == "expires too late"
    assert flaw_of(KEY, ALICE.peer, longest, NOW + MAX_LIFETIME_S) == "expired"


@pytest.mark.parametrize("expires_at", [math.nan, math.inf, -math.inf])
def test_an_expiry_that_is_no_time_is_malformed(expires_at: float) -> None:
    assert flaw_of(KEY, ALICE.peer, sign_record(ALICE, KEY, b"x", expires_at)) == "malformed"


def test_too_large_is_refused_at_both_ends() -> None:
    with pytest.raises(BadInput, match="1024"):
        sign_record(ALICE, KEY, bytes(MAX_RECORD_BYTES), NOW + 180)
    with pytest.raises(BadInput):
        sign_record(ALICE, "k" * 256, b"", NOW + 180)
    assert flaw_of(KEY, ALICE.peer, bytes(MAX_RECORD_BYTES + 1)) == "too large"
