"""What lies between peers in memory: delay, bandwidth, loss, cuts and frozen peers.

A link is a direction between two peers. It never loses bytes: loss is delay (the sender's retransmission), a cut
or a frozen end is silence, and what was under way arrives once the link opens again. Who sends what is not known
here: `streams.py` asks when a piece arrives and waits where the link is shut.
"""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from corolla.ids import PeerId

Link = tuple[PeerId, PeerId]
"""(from, to)."""

MAX_PIECE_BYTES = 64 * 1024
"""Most bytes that arrive in one call, like a socket read."""

MAX_RETRANSMISSIONS = 8
"""With doubling pauses of 0.2 s, 51 s: loss beyond that is a cut."""


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How one direction between two peers behaves."""

    latency_s: float = 0.001
    jitter_s: float = 0.0
    """Up to this much is added to each piece's latency, at random."""
    bytes_per_s: float = math.inf
    loss: float = 0.0
    """Probability that a piece must be sent again; each time again, after a pause that doubles."""
    retransmit_s: float = 0.2

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.jitter_s < 0 or self.bytes_per_s <= 0 or not 0 <= self.loss < 1:
            raise ValueError(f"no link behaves like {self}")


class Links:
    """The state of every link, and who waits for one to open."""

    def __init__(self, rng: random.Random, default: LinkConditions) -> None:
        self._rng = rng
        self._default = default
        self._conditions: dict[Link, LinkConditions] = {}
        self._wire_free_at: dict[Link, float] = {}
        self._cut: set[Link] = set()
        self._frozen: set[PeerId] = set()
        self._waiting: dict[Link, list[Callable[[], None]]] = {}

    def set_conditions(self, link: Link, conditions: LinkConditions) -> None:
        self._conditions[link] = conditions

    def conditions(self, link: Link) -> LinkConditions:
        return self._conditions.get(link, self._default)

    def is_open(self, link: Link) -> bool:
        return link not in self._cut and not self._frozen.intersection(link)

    def can_send(self, peer: PeerId) -> bool:
        """False while the peer is frozen. Into a cut link it can send; the bytes arrive when that is mended."""
        return peer not in self._frozen

    def travel_s(self, link: Link, num_bytes: int) -> float:
        """Seconds until a piece that is sent now has arrived, behind what already fills the wire."""
        conditions = self.conditions(link)
        now = asyncio.get_running_loop().time()
        sent_at = max(now, self._wire_free_at.get(link, 0.0)) + num_bytes / conditions.bytes_per_s
        if conditions.bytes_per_s < math.inf:
            self._wire_free_at[link] = sent_at
        jitter_s = self._rng.random() * conditions.jitter_s if conditions.jitter_s else 0.0
        return sent_at - now + conditions.latency_s + jitter_s + self._retransmissions_s(conditions)

    def piece_bytes(self, num_bytes: int) -> int:
        """How many of these bytes arrive in one call: now and then fewer, so that nobody relies on borders."""
        if num_bytes > 1 and self._rng.random() < 1 / 16:
            return self._rng.randrange(1, min(num_bytes, MAX_PIECE_BYTES + 1))
        return min(num_bytes, MAX_PIECE_BYTES)

    def joins_pieces(self) -> bool:
        """Whether two pieces that arrived together are read in one call; so no writer's borders are kept."""
        return self._rng.random() < 1 / 2

    def cut(self, link: Link) -> None:
        self._cut.add(link)

    def mend(self, link: Link) -> None:
        self._cut.discard(link)
        self._wake()

    def freeze(self, peer: PeerId) -> None:
        self._frozen.add(peer)

    def thaw(self, peer: PeerId) -> None:
        self._frozen.discard(peer)
        self._wake()

    def when_open(self, link: Link, callback: Callable[[], None]) -> None:
        """Call back once when the link opens; (peer, peer) opens when that peer thaws. Only for a shut link."""
        self._waiting.setdefault(link, []).append(callback)

    async def cross(self, link: Link, num_bytes: int = 0) -> None:
        """Wait as long as these bytes take: their travel, and all of it again after each time the link was shut."""
        await asyncio.sleep(self.travel_s(link, num_bytes))
        while not self.is_open(link):
            await self._wait_open(link)
            await asyncio.sleep(self.travel_s(link, num_bytes))

    async def _wait_open(self, link: Link) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.when_open(link, lambda: None if opened.done() else opened.set_result(None))
        await opened

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        for link in [link for link in self._waiting if self.is_open(link)]:
            for callback in self._waiting.pop(link):
                loop.call_soon(callback)

    def _retransmissions_s(self, conditions: LinkConditions) -> float:
        lost = 0
        while lost < MAX_RETRANSMISSIONS and conditions.loss and self._rng.random() < conditions.loss:
            lost += 1
        return conditions.retransmit_s * (2**lost - 1)
