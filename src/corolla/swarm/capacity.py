"""What links from other servers carry: smoothed, ageing, and which of it is worth announcing. Pure."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from corolla.ids import PeerId
from corolla.swarm.announcement import MAX_BYTES_PER_S, MAX_INFLOWS, short_peer

CAPACITY_LIFE_S: Final = 1800.0
"""Only large messages tell, and there may be none for a while; links change more seldom than loads."""
GAIN: Final = 0.2
MAX_PEERS: Final = 256


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes a second, smoothed, and the loop time of the last sample."""

    bytes_per_s: float
    at: float


class Inflows:
    """One server's: how fast bytes come from whom."""

    def __init__(self) -> None:
        self._known: dict[PeerId, Capacity] = {}

    def saw(self, peer: PeerId, bytes_per_s: float, now: float) -> None:
        """A large message from this peer came at this speed."""
        self._known[peer] = after_sample(self._known.get(peer), bytes_per_s, now)
        if len(self._known) > MAX_PEERS:  # clients come and go; they must not grow the table
            del self._known[min(self._known, key=lambda known: self._known[known].at)]

    def to_announce(self, servers: Container[PeerId], now: float) -> dict[str, int]:
        """By `short_peer`, of those that are servers: the slowest links, since only those cost a step anything."""
        fresh = {
            peer: known.bytes_per_s
            for peer, known in self._known.items()
            if peer in servers and now - known.at < CAPACITY_LIFE_S
        }
        slowest = sorted(fresh, key=lambda peer: fresh[peer])[:MAX_INFLOWS]
        return {short_peer(peer): min(max(1, round(fresh[peer])), MAX_BYTES_PER_S) for peer in slowest}


def after_sample(old: Capacity | None, bytes_per_s: float, now: float) -> Capacity:
    """The longer ago the last sample, the more the new one weighs."""
    if old is None:
        return Capacity(bytes_per_s, now)
    gain = min(1.0, max(GAIN, (now - old.at) / CAPACITY_LIFE_S))
    return Capacity(old.bytes_per_s + gain * (bytes_per_s - old.bytes_per_s), now)
