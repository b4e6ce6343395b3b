"""A snapshot of who serves a model: what routing, placement and `status` look at. Immutable; `watch.py` makes them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from corolla.ids import PeerId
from corolla.swarm.announcement import Announcement

Health = Literal["healthy", "fragile", "broken"]
Link = tuple[PeerId, PeerId]
"""(server, the server after it)."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server, as this peer sees it."""

    peer: PeerId
    announcement: Announcement
    expires_at: float
    """Wall time at which the announcement stops to count."""
    rtt_s: float | None = None
    """Round trip from this peer; None: not measured, infinite: it did not answer."""
    queue_s: float | None = None
    """How long our steps wait there, from its replies; None: take what it announces."""
    block_s: float | None = None
    """Seconds that one token takes in one block there, from its replies; None: take what it announces."""

    @property
    def start(self) -> int:
        return self.announcement.start

    @property
    def end(self) -> int:
        return self.announcement.end

    @property
    def claim(self) -> range | None:
        """The blocks that it loads and will host; None: it stays with what it has."""
        said = self.announcement
        if said.moving_to is not None:
            return range(*said.moving_to)
        return range(said.start, said.end) if said.state == "joining" else None

    @property
    def longest_session(self) -> float:
        """Most tokens a row of a session that it takes; infinite where it does not say."""
        return self.announcement.max_session_tokens or math.inf

    @property
    def is_online(self) -> bool:
        return self.announcement.state == "online"

    @property
    def is_usable(self) -> bool:
        """Takes sessions: online, or draining (which routes choose only when nothing else is left)."""
        return self.announcement.state in ("online", "draining")


@dataclass(frozen=True, slots=True)
class View:
    """All servers of one model at one moment."""

    num_blocks: int
    """Of the whole model; 0 while nobody has said."""
    servers: Mapping[PeerId, ServerView] = field(default_factory=lambda: MappingProxyType({}))
    link_penalties_s: Mapping[Link, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds added to links between servers that failed lately."""

    @classmethod
    def of(cls, servers: Iterable[ServerView], *, num_blocks: int | None = None) -> "View":
        """The servers of one model. Those that disagree on how many blocks it has are left out.

        `num_blocks`: as the model's own files say; None: nobody here has them, and most servers' word counts.
        """
        all_servers = list(servers)
        if num_blocks is None:
            votes = Counter(server.announcement.num_blocks for server in all_servers)
            num_blocks = min(votes, key=lambda blocks: (-votes[blocks], blocks), default=0)
        agreeing = {server.peer: server for server in all_servers if server.announcement.num_blocks == num_blocks}
        return cls(num_blocks, MappingProxyType(agreeing))

    @property
    def coverage(self) -> list[int]:
        """How many online servers host each block."""
        return self._count(server for server in self.servers.values() if server.is_online)

    @property
    def missing_blocks(self) -> list[int]:
        """Blocks that no usable server hosts."""
        usable = self._count(server for server in self.servers.values() if server.is_usable)
        return [block for block, count in enumerate(usable) if count == 0]

    @property
    def fragile_blocks(self) -> list[int]:
        """Blocks that are served, but would not be if one more server left."""
        missing = set(self.missing_blocks)
        return [block for block, count in enumerate(self.coverage) if count < 2 and block not in missing]

    @property
    def health(self) -> Health:
        """Broken: blocks are missing (or nobody serves). Fragile: some block hangs on one server. Else healthy."""
        if self.num_blocks == 0 or self.missing_blocks:
            return "broken"
        return "fragile" if self.fragile_blocks else "healthy"

    def without(self, peers: Iterable[PeerId]) -> "View":
        """This view as if these servers were not there."""
        gone = set(peers)
        kept = {peer: server for peer, server in self.servers.items() if peer not in gone}
        return replace(self, servers=MappingProxyType(kept))

    def alive(self, wall_now: float) -> "View":
        """This view without the servers whose announcements have expired at this wall time."""
        return self.without([peer for peer, server in self.servers.items() if server.expires_at <= wall_now])

    def only(self, peers: Iterable[PeerId]) -> "View":
        """This view as if no other servers were there."""
        return self.without(self.servers.keys() - set(peers))

    def covering(self, blocks: range) -> "View":
        """This view as if servers were not there that do not host all of these blocks."""
        return self.only(
            peer for peer, server in self.servers.items() if server.start <= blocks.start and blocks.stop <= server.end
        )

    def taking(self, session_tokens: int) -> "View":
        """This view as if servers were not there that take no session of so many tokens a row, by their own word."""
        return self.without([peer for peer, server in self.servers.items() if server.longest_session < session_tokens])

    def longest_session(self, blocks: range) -> float:
        """Most tokens a row of a session for which servers cover these blocks; 0: they cover them for none."""
        usable = [server for server in self.servers.values() if server.is_usable]
        return min(
            max((server.longest_session for server in usable if server.start <= block < server.end), default=0.0)
            for block in blocks
        )

    def including(self, *servers: ServerView) -> "View":
        """This view with those servers in it, in the place of what was known of them."""
        named = {server.peer: server for server in servers}
        return replace(self, servers=MappingProxyType({**self.servers, **named}))

    def with_rtts(self, rtts: Mapping[PeerId, float]) -> "View":
        """This view with these measured round trips, in seconds; those of other servers stay as they are."""
        measured = {
            peer: replace(server, rtt_s=rtts[peer]) if peer in rtts else server for peer, server in self.servers.items()
        }
        return replace(self, servers=MappingProxyType(measured))

    def _count(self, servers: Iterable[ServerView]) -> list[int]:
        """How many of these servers host each block: steps up and down, then their running sum."""
        steps = [0] * (self.num_blocks + 1)
        for server in servers:
            steps[server.start] += 1
            steps[server.end] -= 1
        return list(accumulate(steps[:-1]))
