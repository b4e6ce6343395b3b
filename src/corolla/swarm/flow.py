"""Chains for batch work: as many as the swarm has room for, each in proportion to what it can carry. Pure.

What a server carries is measured, not its span length: prefill tokens a second times hosted blocks, of which a
chain that runs n blocks there takes n for each token. The chains are found one after the other: the widest first,
then the widest in what it left over (augmenting paths without going back, Ford and Fulkerson 1956). Two chains
that share a narrow server so never count it twice.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corolla.ids import PeerId
from corolla.swarm.cost import CostModel, reserve_s
from corolla.swarm.search import Chain
from corolla.swarm.view import ServerView

MAX_CHAINS = 16
LEAST_SHARE = 0.02
"""Of the first chain's flow: what is narrower than that is not worth a stream of its own."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A chain, and the tokens a second it carries beside the chains found before it."""

    chain: Chain
    tokens_per_s: float


def choose_by_flow(
    servers: Sequence[ServerView], blocks: range, cost: CostModel, *, tokens_needed: int, rng: random.Random
) -> Chain:
    """A chain at random, each as often as its share of the whole flow. The servers must cover the range."""
    flows = find_flows(_in_reach(servers, blocks, cost, tokens_needed), blocks, cost)
    return rng.choices(flows, weights=[flow.tokens_per_s for flow in flows])[0].chain


def find_flows(servers: Sequence[ServerView], blocks: range, cost: CostModel) -> list[Flow]:
    """The widest chain, then the widest in what is left, and so on, while it is worth it."""
    ordered = sorted(servers, key=lambda server: (min(server.end, blocks.stop), server.peer))
    left = {server.peer: capacity(server, cost) for server in ordered}
    flows: list[Flow] = []
    while len(flows) < MAX_CHAINS:
        flow = _widest(ordered, left, blocks)
        if flow is None or (flows and flow.tokens_per_s < LEAST_SHARE * flows[0].tokens_per_s):
            break
        flows.append(flow)
        for peer, start, end in flow.chain:
            left[peer] -= flow.tokens_per_s * (end - start)
    return flows


def capacity(server: ServerView, cost: CostModel) -> float:
    """Tokens × blocks a second, by the server's own measurement of prefill (of decode, if it has no other)."""
    said = server.announcement
    tokens_per_s = said.prefill_tokens_per_s or said.decode_tokens_per_s
    return tokens_per_s * (server.end - server.start) or cost.unknown_tokens_per_s


def _in_reach(servers: Sequence[ServerView], blocks: range, cost: CostModel, tokens_needed: int) -> list[ServerView]:
    """Without those that do not answer, that leave or have no room, as far as the others still cover the range."""

    def answers(server: ServerView) -> bool:
        return server.rtt_s is None or server.rtt_s < 2 * cost.unreachable_s

    def stays(server: ServerView) -> bool:
        return server.is_online

    def has_room(server: ServerView) -> bool:
        return reserve_s(cost, server, tokens_needed) == 0

    kept = list(servers)
    for is_fit in (answers, stays, has_room):
        fewer = [server for server in kept if is_fit(server)]
        if _covers(fewer, blocks):
            kept = fewer
    return kept


def _covers(servers: Sequence[ServerView], blocks: range) -> bool:
    reached = blocks.start
    for server in sorted(servers, key=lambda server: server.start):
        if server.start <= reached:
            reached = max(reached, server.end)
    return reached >= blocks.stop


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The widest way to the end of a server: how wide, where it was entered, after whom."""

    tokens_per_s: float
    peer: PeerId
    start: int
    end: int
    previous: "_Pipe | None"


def _widest(ordered: Sequence[ServerView], left: Mapping[PeerId, float], blocks: range) -> Flow | None:
    """The chain that carries most, of those the one that enters each server earliest: fewer hops."""
    widest: dict[int, _Pipe] = {}
    for server in ordered:
        pipe = _widest_through(server, left[server.peer], blocks, widest)
        if pipe is not None and (pipe.end not in widest or pipe.tokens_per_s > widest[pipe.end].tokens_per_s):
            widest[pipe.end] = pipe
    last = widest.get(blocks.stop)
    return None if last is None else Flow(_chain(last), last.tokens_per_s)


def _widest_through(server: ServerView, left: float, blocks: range, widest: Mapping[int, _Pipe]) -> _Pipe | None:
    end, best = min(server.end, blocks.stop), None
    for start in range(max(server.start, blocks.start), end):
        previous = widest.get(start)
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
