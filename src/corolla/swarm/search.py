"""The search behind `route.py`: shortest ways through the servers of a view. Pure, and quick for a thousand of them.

A server is left only where its span ends (or the range does). So what matters of a server is one number: the
seconds at which its last block is done. These follow from the servers that end inside its span, and ends only grow
along a route: one pass over the servers in the order of their ends finds every shortest path, what Dijkstra's
search over (server, block) would find, without a queue.

What keeps the pass short: nearly every pair of servers has no measured delay of its own, and then the way between
them falls apart into a part of the one and a part of the other (through the client, or a default). So one number
for each block stands for all servers that end there (`_Arrivals`); only pairs with a delay, a capacity or a
penalty of their own (at most eight of each a server, by the announcement's bound) are looked at one by one, and of
these only those that could still be the best by the least that they take.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from corolla.ids import PeerId
from corolla.swarm.announcement import short_peer
from corolla.swarm.cost import CostModel, between_s, block_s, entry_s, one_way_s
from corolla.swarm.view import ServerView, View

ROUNDING_S = 1e-9
"""Sums of the same terms in another order differ by less."""


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """A server as a stop on the way."""

    server: ServerView
    end: int
    """Where it is left: the end of its span or of the range."""
    done_s: float
    """Seconds until its last block is done, by the best way there."""
    way_s: float | None
    """One way to the client; None: not measured."""
    entry_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to come to a server's last block: after `previous` (None: from the client), from block `start` on."""

    previous: Stop | None
    start: int
    done_s: float


Chain = tuple[tuple[PeerId, int, int], ...]
"""(server, start, end) of each hop, in order."""


@dataclass(slots=True)
class _Arrivals:
    """All stops that end at one block, and the best of each kind."""

    stops: list[Stop]
    any_s: float = math.inf
    """Least seconds until a stop is done."""
    any_over: Stop | None = None
    """The stop that is."""
    back_s: float = math.inf
    """Least seconds from the start and back to the client, over a stop whose round trip is known."""
    back_over: Stop | None = None
    unmeasured_s: float = math.inf
    """Least seconds until a stop whose round trip is not known is done."""
    unmeasured: Stop | None = None

    def add(self, stop: Stop) -> None:
        self.stops.append(stop)
        if stop.done_s < self.any_s:
            self.any_s, self.any_over = stop.done_s, stop
        if stop.way_s is None:
            if stop.done_s < self.unmeasured_s:
                self.unmeasured_s, self.unmeasured = stop.done_s, stop
        elif stop.done_s + stop.way_s < self.back_s:
            self.back_s, self.back_over = stop.done_s + stop.way_s, stop


class Search:
    """All shortest ways over a range of blocks; finds nothing where blocks are missing (`route.py` looks first)."""

    def __init__(
        self, view: View, servers: Sequence[ServerView], blocks: range, cost: CostModel, *, tokens_needed: int
    ) -> None:
        self._view = view
        self._blocks = blocks
        self._cost = cost
        self._unknown_s = one_way_s(cost, None)
        self._arrivals: dict[int, _Arrivals] = {}
        self._own_links: dict[str, list[Stop]] = {}
        """Stops with a delay or a penalty of their own to this server (`short_peer`)."""
        self._stops: dict[str, Stop] = {}
        self._penalised: dict[PeerId, list[str]] = {}
        for before, after in view.link_penalties_s:
            self._penalised.setdefault(before, []).append(short_peer(after))
        for server in sorted(servers, key=lambda server: (min(server.end, blocks.stop), server.peer)):
            self._visit(server, tokens_needed)
        self._finals = [
            (stop, stop.done_s + one_way_s(cost, stop.server.rtt_s))
            for stop in (self._arrivals[blocks.stop].stops if blocks.stop in self._arrivals else ())
        ]

    def choose(self, rng: random.Random) -> tuple[Chain, float]:
        """One of the best: back from the client, at each stop at random among what keeps the whole a near tie."""
        limit_s = min(total_s for _, total_s in self._finals) * (1 + self._cost.near_tie)
        stop, total_s = rng.choice([final for final in self._finals if final[1] <= limit_s])
        hops: list[tuple[PeerId, int, int]] = []
        while True:
            slack_s = max(limit_s - total_s, 0.0) + ROUNDING_S  # the best way must always pass
            entry = rng.choice([entry for entry in self._entries(stop) if entry.done_s <= stop.done_s + slack_s])
            total_s += entry.done_s - stop.done_s
            hops.append((stop.server.peer, entry.start, stop.end))
            if entry.previous is None:
                return tuple(reversed(hops)), total_s
            stop = entry.previous

    def in_order(self) -> Iterator[tuple[Chain, float]]:
        """All chains, the cheapest first: best-first from the client backwards, where every estimate is exact."""
        tie = count()
        heap: list[tuple[float, int, Stop | None, Chain]] = [
            (total_s, next(tie), stop, ()) for stop, total_s in self._finals
        ]
        heapq.heapify(heap)
        while heap:
            total_s, _, stop, rest = heapq.heappop(heap)
            if stop is None:
                yield rest, total_s
                continue
            for entry in self._entries(stop):
                chain = ((stop.server.peer, entry.start, stop.end), *rest)
                heapq.heappush(heap, (total_s - stop.done_s + entry.done_s, next(tie), entry.previous, chain))

    def _visit(self, server: ServerView, tokens_needed: int) -> None:
        cost, end = self._cost, min(server.end, self._blocks.stop)
        way_s = None if server.rtt_s is None else one_way_s(cost, server.rtt_s)
        at_entry_s, per_block_s = entry_s(cost, server, tokens_needed), block_s(cost, server)
        arrive_s = self._best_arrival_s(server, end, way_s, per_block_s)
        if arrive_s == math.inf:
            return
        stop = Stop(server, end, arrive_s + at_entry_s, way_s, at_entry_s, per_block_s)
        self._arrivals.setdefault(end, _Arrivals([])).add(stop)
        self._stops[short_peer(server.peer)] = stop
        for following in (*server.announcement.next_rtts, *self._penalised.get(server.peer, ())):
            self._own_links.setdefault(following, []).append(stop)

    def _best_arrival_s(self, server: ServerView, end: int, way_s: float | None, per_block_s: float) -> float:
        """Least seconds of travel and compute, this server's included, before its own overhead."""
        first, best_s = self._blocks.start, math.inf
        if server.start <= first:
            best_s = one_way_s(self._cost, server.rtt_s) + (end - first) * per_block_s
        own: dict[int, list[Stop]] = {}
        measured = (self._stops.get(before) for before in server.announcement.inflows)
        for stop in (*self._own_links.get(short_peer(server.peer), ()), *measured):
            if stop is not None:
                own.setdefault(stop.end, []).append(stop)
        inside = range(max(server.start, first + 1), end)
        arrivals, unknown_s = self._arrivals, self._unknown_s
        for start in inside:
            there = arrivals.get(start)
            if there is None or start in own:
                continue
            if way_s is None:
                arrive_s = there.any_s + unknown_s
            else:  # sixty thousand times in a thousand servers: without a call
                back_s, unmeasured_s = there.back_s + way_s, there.unmeasured_s + unknown_s
                arrive_s = back_s if back_s < unmeasured_s else unmeasured_s
            done_s = arrive_s + (end - start) * per_block_s
            if done_s < best_s:
                best_s = done_s
        for start, stops in own.items():
            if start in inside:
                best_s = self._over_own_links_s(stops, server, way_s, (end - start) * per_block_s, best_s)
        return best_s

    def _over_own_links_s(
        self, own: Sequence[Stop], server: ServerView, way_s: float | None, compute_s: float, best_s: float
    ) -> float:
        """`best_s`, or less: over these stops by their own links, over the others that end there as for any.

        Most are ruled out before their link is looked at: by the least that it, or any of the others, could take.
        """
        for stop in own:
            if stop.done_s + compute_s < best_s:
                best_s = min(best_s, stop.done_s + between_s(self._cost, self._view, stop.server, server) + compute_s)
        there = self._arrivals[own[0].end]
        if self._over_any_s(there, way_s) + compute_s < best_s:
            best_s = min(best_s, self._over_others_s(there, own, way_s) + compute_s)
        return best_s

    def _over_any_s(self, there: _Arrivals, way_s: float | None) -> float:
        """Over the stop that is best by no link of its own."""
        if way_s is None:
            return there.any_s + self._unknown_s
        return min(there.back_s + way_s, there.unmeasured_s + self._unknown_s)

    def _over_others_s(self, there: _Arrivals, own: Sequence[Stop], way_s: float | None) -> float:
        """Over all stops but these: by the best of all, if it is none of these."""
        others = there
        if {there.any_over, there.back_over, there.unmeasured}.intersection(own):
            others = _Arrivals([])
            for stop in there.stops:
                if stop not in own:
                    others.add(stop)
        return self._over_any_s(others, way_s)

    def _entries(self, stop: Stop) -> Iterator[Entry]:
        """Every way to come to this stop, from the client or from a stop that ends inside its span."""
        first, server = self._blocks.start, stop.server
        if server.start <= first:
            there_s = one_way_s(self._cost, server.rtt_s)
            yield Entry(None, first, there_s + stop.entry_s + (stop.end - first) * stop.block_s)
        for start in range(max(server.start, first + 1), stop.end):
            there = self._arrivals.get(start)
            for previous in there.stops if there is not None else ():
                there_s = previous.done_s + between_s(self._cost, self._view, previous.server, server)
                yield Entry(previous, start, there_s + stop.entry_s + (stop.end - start) * stop.block_s)
