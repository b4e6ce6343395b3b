"""A session's route as a trace keeps it: servers with their names, expected delays, and the best other chain."""

from collections.abc import Sequence

from corolla.apps.gateway.traces import TracedHop, TracedRoute
from corolla.client.router import Router
from corolla.client.session import RouteHop as SessionHop
from corolla.errors import MissingBlocks
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
    if price is None:
        return TracedRoute(named, ())
    return TracedRoute(named, (*(hop.travel_s for hop in price.hops), price.return_s), price.total_s - price.penalty_s)


def _name_of(view: View, hop: RouteHop) -> str:
    server = view.servers.get(hop.peer)
    return server.announcement.name if server is not None else ""
