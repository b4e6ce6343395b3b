"""Signed records: what a peer publishes about itself, and how everyone checks it.

A record is bytes under (key, peer id), signed by that very peer: an Ed25519 peer id contains the public key,
so no other key can sign for it. Checked by every peer that stores it and again by every reader:
the signature, the size (1 KB) and the expiry (10 minutes ahead at most, plus tolerated clock skew).

What travels is a *blob*: version (1 byte), expiry (8, float), length of the key (1), key, signature (64), value.
The signature covers a prefix of ours, the peer id and every other byte of the blob: nothing can be changed,
moved under another key, or mistaken for something else this peer signed. The blob names its key because a
storing peer of the DHT otherwise knows only a hash of it.
"""

import math
import struct
from dataclasses import dataclass
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature

from corolla.errors import BadInput, RemoteProtocolError
from corolla.ids import PeerId
from corolla.net.identity import Identity, public_key_of

MAX_RECORD_BYTES = 1024
"""Of a whole blob: a key with 500 of them stays far below the 4 MiB that one reply of the DHT may have."""
MAX_LIFETIME_S = 600.0
CLOCK_SKEW_S = 60.0
"""How far apart wall clocks may be. A record must outlive its refresh by this much, or a reader whose clock is
ahead sees nothing: lifetime ≥ refresh period + skew + margin (hence 180 s, refreshed every 45 s)."""
REPLICAS = 8
"""Peers that keep a record beside its publisher: with hivemind's 5, half of them may vanish between refreshes."""

_HEAD: Final = struct.Struct("!BdB")
_VERSION: Final = 1
_SIGNATURE_BYTES: Final = 64
_DOMAIN: Final = b"corolla record 1\x00"

Flaw = Literal["malformed", "too large", "wrong key", "wrong peer", "bad signature", "expires too late", "expired"]


class RecordRejected(RemoteProtocolError):
    """A record that must be neither stored nor believed; `flaw` says what is wrong with it."""

    def __init__(self, flaw: Flaw, detail: str) -> None:
        self.flaw: Flaw = flaw
        super().__init__(f"record rejected: {flaw}: {detail}")


@dataclass(frozen=True, slots=True)
class Record:
    """One peer's verified value under a key."""

    peer: PeerId
    value: bytes
    expires_at: float
    """Wall time, by the publisher's clock."""


def sign_record(identity: Identity, key: str, value: bytes, expires_at: float) -> bytes:
    """The blob to publish under (key, our peer id). Raises BadInput when it would be over 1 KB."""
    raw_key = key.encode()
    num_bytes = _HEAD.size + len(raw_key) + _SIGNATURE_BYTES + len(value)
    if num_bytes > MAX_RECORD_BYTES or len(raw_key) > 255:
        raise BadInput(f"a record of {num_bytes} bytes is over the bound of {MAX_RECORD_BYTES} (key of 255)")
    head = _HEAD.pack(_VERSION, expires_at, len(raw_key)) + raw_key
    return head + identity.sign(_signed_part(identity.peer, head, value)) + value


def verify_record(key: str, peer: PeerId, blob: bytes, now: float) -> Record:
    """The record, safe to believe at wall time `now`. Raises RecordRejected."""
    record = open_record(key, peer, blob)
    check_times(record, now)
    if record.expires_at <= now:
        raise RecordRejected("expired", f"{now - record.expires_at:.1f} s ago")
    return record


def open_record(key: str, peer: PeerId, blob: bytes) -> Record:
    """The part of `verify_record` that no clock changes: form, size, key and signature."""
    own_key, expires_at, head_bytes = _read_head(blob)
    if own_key != key:
        raise RecordRejected("wrong key", f"{own_key!r:.80} published under {key!r:.80}")
    signature, value = blob[head_bytes:][:_SIGNATURE_BYTES], blob[head_bytes + _SIGNATURE_BYTES :]
    try:
        public_key = public_key_of(peer)
    except ValueError as fault:
        raise RecordRejected("wrong peer", str(fault)) from fault
    try:
        public_key.verify(signature, _signed_part(peer, blob[:head_bytes], value))
    except InvalidSignature as fault:
        raise RecordRejected("bad signature", f"not signed by {peer}") from fault
    return Record(peer, value, expires_at)


def check_times(record: Record, now: float) -> None:
    """Refuse a record that would outstay its welcome. One that has expired harms nobody and passes here."""
    ahead_s = record.expires_at - now
    if ahead_s > MAX_LIFETIME_S + CLOCK_SKEW_S:
        raise RecordRejected("expires too late", f"in {ahead_s:.0f} s; at most {MAX_LIFETIME_S + CLOCK_SKEW_S:.0f}")


def claimed_key(blob: bytes) -> str:
    """The key that a blob says it belongs to. Raises RecordRejected when it says nothing."""
    return _read_head(blob)[0]


def _read_head(blob: bytes) -> tuple[str, float, int]:
    """Key, expiry and length of what comes before the signature; sizes are checked first."""
    if len(blob) > MAX_RECORD_BYTES:
        raise RecordRejected("too large", f"{len(blob)} bytes; at most {MAX_RECORD_BYTES}")
    if len(blob) < _HEAD.size:
        raise RecordRejected("malformed", f"{len(blob)} bytes are no record")
    version, expires_at, key_bytes = _HEAD.unpack_from(blob)
    head_bytes = _HEAD.size + key_bytes
    if version != _VERSION or not math.isfinite(expires_at) or len(blob) < head_bytes + _SIGNATURE_BYTES:
        raise RecordRejected("malformed", f"version {version}, expiry {expires_at}, {len(blob)} bytes")
    try:
        return blob[_HEAD.size : head_bytes].decode(), expires_at, head_bytes
    except UnicodeDecodeError as fault:
        raise RecordRejected("malformed", "its key is not text") from fault


def _signed_part(peer: PeerId, head: bytes, value: bytes) -> bytes:
    """Unambiguous: a peer id has no zero byte, and the head says its own length."""
    return b"".join((_DOMAIN, peer.encode(), b"\x00", head, value))
