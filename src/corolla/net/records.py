"""Signed records: what a peer publishes about itself, and how everyone checks it.

A record is bytes under (key, peer id), signed by that very peer: an Ed25519 peer id contains the public key,
so no other key can sign for it. Checked by every peer that stores it and again by every reader:
the signature, the size (1 KB) and the expiry (10 minutes ahead at most, plus tolerated clock skew).
"""

from dataclasses import dataclass

from corolla.ids import PeerId

MAX_RECORD_BYTES = 1024
MAX_LIFETIME_S = 600.0
CLOCK_SKEW_S = 60.0
"""How far apart wall clocks may be. A record must outlive its refresh by this much, or a reader whose clock is
ahead sees nothing: lifetime ≥ refresh period + skew + margin (hence 180 s, refreshed every 45 s)."""


@dataclass(frozen=True, slots=True)
class Record:
    """One peer's verified value under a key."""

    peer: PeerId
    value: bytes
    expires_at: float
    """Wall time, by the publisher's clock."""
