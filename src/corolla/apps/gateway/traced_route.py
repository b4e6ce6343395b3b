"""A session's route as a trace keeps it: servers with their names, measured delays, and the best other chain."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from corolla.apps.gateway.traces import TracedHop, TracedRoute
from corolla.client.router import Router
from corolla.client.session import RouteHop as SessionHop
from corolla.errors import MissingBlocks
from corolla.ids import PeerId
from corolla.swarm.announcement import SHORT_PEER_CHARS
from corolla.swarm.chain import RouteHop, price_route
from corolla.swarm.cost import CostModel
from corolla.swarm.route import find_routes
from corolla.swarm.view import View


def describe_route(
    router: Router, hops: Sequence[SessionHop], cost: CostModel, *, tokens_needed: int
) -> tuple[TracedRoute, TracedRoute | None]:
    """The route that a session took, and the runner-up: the cheapest chain that is another. Never waits."""
    view = router.usable_view()
    used = tuple(RouteHop(hop.peer_id, hop.start, hop.end) for hop in hops)
    return _described(view, used, cost, tokens_needed), _runner_up(view, used, router, cost, tokens_needed)


def _runner_up(
    view: View, used: tuple[RouteHop, ...], router: Router, cost: CostModel, tokens_needed: int
) -> TracedRoute | None:
    try:
        best = find_routes(view, router.model.num_blocks, cost, tokens_needed=tokens_needed, count=2)
    except MissingBlocks:  # a server of the route has just left: then there is no other chain
        return None
    others = [route.hops for route in best if route.hops != used]
    return _described(view, others[0], cost, tokens_needed) if others else None


def _described(view: View, hops: tuple[RouteHop, ...], cost: CostModel, tokens_needed: int) -> TracedRoute:
    named = tuple(TracedHop(hop.peer, _name_of(view, hop), hop.start, hop.end) for hop in hops)
    price = price_route(view, hops, cost, tokens_needed=tokens_needed)
    expected_s = None if price is None else price.total_s - price.penalty_s
    return TracedRoute(named, tuple(_links_s(view, [hop.peer for hop in hops])), expected_s)


def _links_s(view: View, peers: Sequence[PeerId]) -> Iterator[float | None]:
    """Half of the measured round trip of each link of the ring: we measure ours, servers announce theirs."""
    servers = [view.servers.get(peer) for peer in peers]
    yield _half(servers[0].rtt_s if servers[0] is not None else None)
    for before, after in pairwise(peers):
        server = view.servers.get(before)
        yield _half(server.announcement.next_rtts.get(after[-SHORT_PEER_CHARS:]) if server is not None else None)
    yield _half(servers[-1].rtt_s if servers[-1] is not None else None)


def _half(rtt_s: float | None) -> float | None:
    return None if rtt_s is None else rtt_s / 2


def _name_of(view: View, hop: RouteHop) -> str:
    server = view.servers.get(hop.peer)
    return server.announcement.name if server is not None else ""
