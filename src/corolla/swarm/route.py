"""The cheapest chain of servers over a range of blocks: a shortest path, pure and in seconds.

A server is left only where its span ends (or the range does). So what matters of a server is one number: the
seconds at which its last block is done. These follow from the servers that end inside its span, and ends only grow
along a route: one pass over the servers in the order of their ends finds every shortest path, what Dijkstra's
search over (server, block) would find, without a queue.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corolla.errors import MissingBlocks
from corolla.ids import PeerId
from corolla.swarm.cost import CostModel, between_s, block_s, entry_s, one_way_s
from corolla.swarm.view import ServerView, View


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One server of a route, and which of its blocks run there."""

    peer: PeerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Route:
    """Hops that cover a range of blocks without gap or overlap, in order."""

    hops: tuple[RouteHop, ...]
    cost_s: float
    """Seconds that one decode step is expected to take."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """A server as a stop on the way."""

    server: ServerView
    end: int
    """Where it is left: the end of its span or of the range."""
    entries: "tuple[_Entry, ...]"
    """Every way to come to its last block."""
    done_s: float
    """Seconds to there by the best of them."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One way to come to a server's last block: after `previous` (None: from the client), from block `start` on."""

    previous: _Stop | None
    start: int
    done_s: float


def find_route(view: View, blocks: range | int, cost: CostModel, *, tokens_needed: int, rng: random.Random) -> Route:
    """The cheapest route over `blocks` (a number: all blocks of a model of that many), near ties broken at random.

    Only servers that are online count; draining ones when nothing else is left. Raises MissingBlocks, before any
    search, when some block has neither.
    """
    blocks = range(blocks) if isinstance(blocks, int) else blocks
    assert len(blocks) == blocks.stop - blocks.start > 0, "a route covers at least one block, and consecutive ones"
    servers = [server for server in view.servers.values() if server.is_usable and _overlaps(server, blocks)]
    _require_coverage(servers, blocks)
    stops = _shortest_ways(servers, blocks, cost, tokens_needed)
    return _choose(stops, blocks, cost, rng)


def _overlaps(server: ServerView, blocks: range) -> bool:
    return server.start < blocks.stop and blocks.start < server.end


def _require_coverage(servers: Sequence[ServerView], blocks: range) -> None:
    """Covered means routable: wherever a span ends inside the range, some server hosts the next block."""
    covered = {block for server in servers for block in range(server.start, server.end)}
    missing = [block for block in blocks if block not in covered]
    if missing:
        raise MissingBlocks(missing)


def _shortest_ways(servers: Sequence[ServerView], blocks: range, cost: CostModel, tokens_needed: int) -> list[_Stop]:
    """All servers that the client can come to, with every way there."""
    stops: list[_Stop] = []
    ending_at: dict[int, list[_Stop]] = {}
    for server in sorted(servers, key=lambda server: (min(server.end, blocks.stop), server.peer)):
        end = min(server.end, blocks.stop)
        entries = _ways_to(server, blocks.start, end, ending_at, cost, tokens_needed)
        if entries:
            stop = _Stop(server, end, entries, min(entry.done_s for entry in entries))
            stops.append(stop)
            ending_at.setdefault(end, []).append(stop)
    return stops


def _ways_to(
    server: ServerView, first: int, end: int, ending_at: Mapping[int, list[_Stop]], cost: CostModel, tokens_needed: int
) -> tuple[_Entry, ...]:
    """From the client if the server hosts the `first` block, and from every stop that ends inside its span."""
    at_entry_s, per_block_s = entry_s(cost, server, tokens_needed), block_s(cost, server)
    entries: list[_Entry] = []
    if server.start <= first:
        there_s = one_way_s(cost, server.rtt_s)
        entries.append(_Entry(None, first, there_s + at_entry_s + (end - first) * per_block_s))
    for start in range(max(server.start, first + 1), end):
        for previous in ending_at.get(start, ()):
            there_s = previous.done_s + between_s(cost, previous.server, server)
            entries.append(_Entry(previous, start, there_s + at_entry_s + (end - start) * per_block_s))
    return tuple(entries)


def _choose(stops: Sequence[_Stop], blocks: range, cost: CostModel, rng: random.Random) -> Route:
    """Walk back from the client, at each stop at random among the ways that keep the whole within a near tie."""
    finals = [(stop, stop.done_s + one_way_s(cost, stop.server.rtt_s)) for stop in stops if stop.end == blocks.stop]
    best_s = min(total_s for _, total_s in finals)
    limit_s = best_s * (1 + cost.near_tie)
    stop, total_s = rng.choice([final for final in finals if final[1] <= limit_s])
    hops: list[RouteHop] = []
    while True:
        slack_s = max(limit_s - total_s, 0.0)  # never below 0 by rounding: the best way must always pass
        entry = rng.choice([entry for entry in stop.entries if entry.done_s <= stop.done_s + slack_s])
        total_s += entry.done_s - stop.done_s
        hops.append(RouteHop(stop.server.peer, entry.start, stop.end))
        if entry.previous is None:
            return Route(tuple(reversed(hops)), total_s)
        stop = entry.previous
