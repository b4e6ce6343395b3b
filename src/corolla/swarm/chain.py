"""A route as a value, and what each part of it costs: the prices that `search.py` minimises, told one by one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from corolla.ids import PeerId
from corolla.swarm.cost import (
    CostModel,
    between_s,
    block_s,
    idle_block_s,
    leaving_s,
    one_way_s,
    queue_s,
    reserve_s,
    transfer_s,
)
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
    """Seconds that one step is expected to take."""


@dataclass(frozen=True, slots=True)
class HopPrice:
    """What one hop adds to a step, in seconds, term by term."""

    hop: RouteHop
    travel_s: float
    """From the client or the hop before, one way; penalties of that link included."""
    transfer_s: float
    """What the step's bytes take on a link whose capacity is known."""
    overhead_s: float
    queue_s: float
    compute_s: float
    penalty_s: float
    """Not time, but reluctance: no room for the session, or a server that leaves."""

    @property
    def total_s(self) -> float:
        return self.travel_s + self.transfer_s + self.overhead_s + self.queue_s + self.compute_s + self.penalty_s


@dataclass(frozen=True, slots=True)
class RoutePrice:
    """All terms of a route; they sum up to its cost."""

    hops: tuple[HopPrice, ...]
    return_s: float
    """From the last hop back to the client, one way."""

    @property
    def total_s(self) -> float:
        return sum(hop.total_s for hop in self.hops) + self.return_s

    @property
    def penalty_s(self) -> float:
        """The part of the total that is no time."""
        return sum(hop.penalty_s for hop in self.hops)


def price_route(view: View, hops: Iterable[RouteHop], cost: CostModel, *, tokens_needed: int) -> RoutePrice | None:
    """What this chain costs in this view, term by term; None when one of its servers no longer serves its part."""
    prices: list[HopPrice] = []
    previous: ServerView | None = None
    for hop in hops:
        server = view.servers.get(hop.peer)
        if server is None or not server.is_usable or not server.start <= hop.start < hop.end <= server.end:
            return None
        carried_s = 0.0 if previous is None else transfer_s(cost, previous, server)
        there_s = one_way_s(cost, server.rtt_s) if previous is None else between_s(cost, view, previous, server)
        prices.append(_price_hop(server, hop, there_s - carried_s, carried_s, cost, tokens_needed))
        previous = server
    return None if previous is None else RoutePrice(tuple(prices), one_way_s(cost, previous.rtt_s))


def _price_hop(
    server: ServerView, hop: RouteHop, travel_s: float, carried_s: float, cost: CostModel, tokens_needed: int
) -> HopPrice:
    return HopPrice(
        hop,
        travel_s=travel_s,
        transfer_s=carried_s,
        overhead_s=cost.hop_overhead_s,
        queue_s=queue_s(server),
        compute_s=(hop.end - hop.start) * block_s(cost, server),
        penalty_s=reserve_s(cost, server, tokens_needed) + leaving_s(cost, server),
    )


def load_s(view: View, route: Route, cost: CostModel) -> float:
    """How much of a route's cost comes from other people's work: waiting, and compute slower than announced."""
    waits: list[float] = []
    for hop in route.hops:
        server = view.servers[hop.peer]
        slowed_s = max(0.0, block_s(cost, server) - idle_block_s(cost, server))
        waits.append(queue_s(server) + (hop.end - hop.start) * slowed_s)
    return math.fsum(waits)


def is_whole(hops: tuple[RouteHop, ...], blocks: range) -> bool:
    """Whether these hops cover the range from end to end, each beginning where the one before it ends."""
    edges = bool(hops) and hops[0].start == blocks.start and hops[-1].end == blocks.stop
    return edges and all(before.end == after.start for before, after in pairwise(hops))
