"""Chains for batch work: as many as the swarm has room for, each in proportion to what it can carry. Pure.

What a server carries is measured, not its span length: prefill tokens a second times hosted blocks, of which a
chain that runs n blocks there takes n for each token. The chains are found one after the other: the widest first,
then the widest in what it left over (augmenting paths without going back, Ford and Fulkerson 1956). Two chains
that share a narrow server so never count it twice. Servers and links that seem unreachable are left out, as far as
the rest still makes a chain.
"""

import math
import random
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from corolla.ids import PeerId
from corolla.swarm.announcement import short_peer
from corolla.swarm.cost import CostModel, reserve_s
from corolla.swarm.peers import LINK_PENALTY_S
from corolla.swarm.search import Chain, Search
from corolla.swarm.view import ServerView, View

MAX_CHAINS = 16
LEAST_SHARE = 0.02
"""Of the first chain's flow: what is narrower than that is not worth a stream of its own."""
BARRED_PENALTY_S: Final = LINK_PENALTY_S / 2
"""A link with so much of a penalty is left out: it failed in the last minute, or more than once in the last few."""

BarredLinks = Mapping[str, Collection[PeerId]]
"""By a server's `short_peer`: the servers that cannot reach it, as they announce or as this peer was told."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A chain, and the tokens a second it carries beside the chains found before it."""

    chain: Chain
    tokens_per_s: float


def choose_by_flow(
    view: View,
    servers: Sequence[ServerView],
    blocks: range,
    cost: CostModel,
    *,
    tokens_needed: int,
    rng: random.Random,
) -> Chain:
    """A chain at random, each as often as its share of the whole flow. The servers must cover the range.

    Where every chain needs a barred link, the one with the least reluctance: the cheapest.
    """
    fit = _in_reach(servers, blocks, cost, tokens_needed)
    flows = find_flows(fit, blocks, cost, barred=barred_links(view, servers, cost))
    if not flows:
        return Search(view, servers, blocks, cost, tokens_needed=tokens_needed).choose(rng)[0]
    return rng.choices(flows, weights=[flow.tokens_per_s for flow in flows])[0].chain


def find_flows(
    servers: Sequence[ServerView], blocks: range, cost: CostModel, *, barred: BarredLinks = MappingProxyType({})
) -> list[Flow]:
    """The widest chain, then the widest in what is left, and so on, while it is worth it; none over a barred link."""
    ordered = sorted(servers, key=lambda server: (min(server.end, blocks.stop), server.peer))
    left = {server.peer: capacity(server, cost) for server in ordered}
    flows: list[Flow] = []
    while len(flows) < MAX_CHAINS:
        flow = _widest(ordered, left, blocks, barred)
        if flow is None or (flows and flow.tokens_per_s < LEAST_SHARE * flows[0].tokens_per_s):
            break
        flows.append(flow)
        for peer, start, end in flow.chain:
            left[peer] -= flow.tokens_per_s * (end - start)
    return flows


def barred_links(view: View, servers: Sequence[ServerView], cost: CostModel) -> BarredLinks:
    """Links that are known as unreachable: announced as that by the server before, or failed of late."""
    barred: dict[str, set[PeerId]] = {}
    for server in servers:
        for following, rtt_s in server.announcement.next_rtts.items():
            if not _is_answer(rtt_s, cost):
                barred.setdefault(following, set()).add(server.peer)
    for (before, after), penalty_s in view.link_penalties_s.items():
        if penalty_s >= BARRED_PENALTY_S:
            barred.setdefault(short_peer(after), set()).add(before)
    return barred


def capacity(server: ServerView, cost: CostModel) -> float:
    """Tokens × blocks a second, by the server's own measurement of prefill (of decode, if it has no other)."""
    said = server.announcement
    tokens_per_s = said.prefill_tokens_per_s or said.decode_tokens_per_s
    return tokens_per_s * (server.end - server.start) or cost.unknown_tokens_per_s


def _in_reach(servers: Sequence[ServerView], blocks: range, cost: CostModel, tokens_needed: int) -> list[ServerView]:
    """Without those that do not answer, that leave or have no room, but for those on blocks that no other hosts."""

    def answers(server: ServerView) -> bool:
        return server.rtt_s is None or _is_answer(server.rtt_s, cost)

    def stays(server: ServerView) -> bool:
        return server.is_online

    def has_room(server: ServerView) -> bool:
        return reserve_s(cost, server, tokens_needed) == 0

    kept = list(servers)
    for is_fit in (answers, stays, has_room):
        open_blocks = set(blocks).difference(*(range(server.start, server.end) for server in kept if is_fit(server)))
        kept = [
            server for server in kept if is_fit(server) or not open_blocks.isdisjoint(range(server.start, server.end))
        ]
    return kept


def _is_answer(rtt_s: float, cost: CostModel) -> bool:
    """A longer round trip says that the other cannot be reached (`UNREACHABLE_RTT_S`, infinity)."""
    return rtt_s < 2 * cost.unreachable_s


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The widest way to the end of a server: how wide, where it was entered, after whom."""

    tokens_per_s: float
    peer: PeerId
    start: int
    end: int
    previous: "_Pipe | None"


def _widest(
    ordered: Sequence[ServerView], left: Mapping[PeerId, float], blocks: range, barred: BarredLinks
) -> Flow | None:
    """The chain that carries most, of those the one that enters each server earliest: fewer hops."""
    pipes: dict[int, list[_Pipe]] = {}
    for server in ordered:
        cut_off = barred.get(short_peer(server.peer), ())
        pipe = _widest_through(server, left[server.peer], blocks, pipes, cut_off)
        if pipe is not None:
            insort(pipes.setdefault(pipe.end, []), pipe, key=lambda pipe: -pipe.tokens_per_s)
    last = next(iter(pipes.get(blocks.stop, ())), None)
    return None if last is None else Flow(_chain(last), last.tokens_per_s)


def _widest_through(
    server: ServerView, left: float, blocks: range, pipes: Mapping[int, Sequence[_Pipe]], cut_off: Collection[PeerId]
) -> _Pipe | None:
    """`pipes`: by the block they end at, the widest first; `cut_off`: servers that cannot reach this one."""
    end, best = min(server.end, blocks.stop), None
    for start in range(max(server.start, blocks.start), end):
        previous = next((pipe for pipe in pipes.get(start, ()) if pipe.peer not in cut_off), None)
        if previous is None and start > blocks.start:
            continue
        tokens_per_s = min(left / (end - start), math.inf if previous is None else previous.tokens_per_s)
        if tokens_per_s > 0 and (best is None or tokens_per_s > best.tokens_per_s):
            best = _Pipe(tokens_per_s, server.peer, start, end, previous)
    return best


def _chain(last: _Pipe) -> Chain:
    hops: list[tuple[PeerId, int, int]] = []
    pipe: _Pipe | None = last
    while pipe is not None:
        hops.append((pipe.peer, pipe.start, pipe.end))
        pipe = pipe.previous
    return tuple(reversed(hops))
