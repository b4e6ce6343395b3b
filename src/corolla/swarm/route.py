"""The best chain of servers over a range of blocks: pure, in seconds, near ties at random.

`find_route` is what a session asks, for failover too: without the servers that it lost. `find_routes` gives the k best
(the runner-up in `corolla route` and in traces; for hedging). Which servers may be used is said by the view:
`view.without(…)`, `view.only(…)`, and `peers.py` for bans.
"""

import random
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Final, Literal

from corolla.errors import MissingBlocks
from corolla.swarm.chain import Route as Route
from corolla.swarm.chain import RouteHop as RouteHop
from corolla.swarm.chain import is_whole, load_s, price_route
from corolla.swarm.cost import CostModel
from corolla.swarm.flow import choose_by_flow
from corolla.swarm.search import Chain, Search
from corolla.swarm.view import ServerView, View

Mode = Literal["min_latency", "max_throughput"]
"""Seconds of one step, for people who wait; or tokens a second over many requests, for batch work."""
CHANCE: Final = random.SystemRandom()
"""Falls otherwise for each caller, in forked processes too: no two clients break the same ties alike."""


def find_route(
    view: View,
    blocks: range | int,
    cost: CostModel,
    *,
    tokens_needed: int,
    mode: Mode = "min_latency",
    rng: random.Random = CHANCE,
    current: Route | None = None,
) -> Route:
    """The cheapest route over `blocks` (a number: all blocks of a model of that many), near ties broken at random.

    `current` is the route in use, if any: it is kept while no other is clearly cheaper, and left with a
    probability that keeps clients from all moving at once (`leave_probability`). Only servers that are online
    count; draining ones when nothing else is left. Raises MissingBlocks, before any search, when some block has
    neither.
    """
    blocks = range(blocks) if isinstance(blocks, int) else blocks
    servers = _usable(view, blocks)
    if mode == "max_throughput":
        chain = choose_by_flow(view, servers, blocks, cost, tokens_needed=tokens_needed, rng=rng)
        price = price_route(view, (hops := _hops(chain)), cost, tokens_needed=tokens_needed)
        assert price is not None, "a chain of usable servers has a price"
        return Route(hops, price.total_s)
    chain, cost_s = Search(view, servers, blocks, cost, tokens_needed=tokens_needed).choose(rng)
    best = Route(_hops(chain), cost_s)
    if current is None or not is_whole(current.hops, blocks):
        return best
    return _keep_or_leave(view, current, best, cost, tokens_needed, rng)


def find_routes(view: View, blocks: range | int, cost: CostModel, *, tokens_needed: int, count: int) -> list[Route]:
    """The `count` cheapest routes, or fewer when there are no more; the cheapest first. Raises MissingBlocks."""
    blocks = range(blocks) if isinstance(blocks, int) else blocks
    search = Search(view, _usable(view, blocks), blocks, cost, tokens_needed=tokens_needed)
    return [Route(_hops(chain), cost_s) for chain, cost_s in islice(search.in_order(), count)]


def leave_probability(now_s: float, best_s: float, load_s: float, cost: CostModel) -> float:
    """How likely a client should leave a route of `now_s` for one of `best_s`.

    Of what the present route costs, `load_s` comes from others who use it. If all of them left for the better one,
    that would be the crowded one next. A difference of d between two equal servers is evened out when the share
    d / (2 × load) of the busier one's clients moves; one that load cannot explain is no reason to wait.
    """
    gain_s = now_s - best_s
    if gain_s <= cost.switch_gain * now_s:
        return 0.0
    return 1.0 if 2 * load_s <= gain_s else gain_s / (2 * load_s)


def _keep_or_leave(
    view: View, current: Route, best: Route, cost: CostModel, tokens_needed: int, rng: random.Random
) -> Route:
    price = price_route(view, current.hops, cost, tokens_needed=tokens_needed)
    if price is None:
        return best
    leave = leave_probability(price.total_s, best.cost_s, load_s(view, current, cost), cost)
    return best if rng.random() < leave else Route(current.hops, price.total_s)


def _usable(view: View, blocks: range) -> list[ServerView]:
    """The servers that take sessions on some of these blocks. Raises MissingBlocks when a block has none."""
    assert len(blocks) == blocks.stop - blocks.start > 0, "a route covers at least one block, and consecutive ones"
    servers = [
        server
        for server in view.servers.values()
        if server.is_usable and server.start < blocks.stop and blocks.start < server.end
    ]
    _require_coverage(servers, blocks)
    return servers


def _require_coverage(servers: Sequence[ServerView], blocks: range) -> None:
    """Covered means routable: wherever a span ends inside the range, some server hosts the next block."""
    steps = [0] * (len(blocks) + 1)
    for server in servers:
        steps[max(server.start, blocks.start) - blocks.start] += 1
        steps[min(server.end, blocks.stop) - blocks.start] -= 1
    missing = [block for block, num_servers in zip(blocks, accumulate(steps), strict=False) if num_servers == 0]
    if missing:
        raise MissingBlocks(missing)


def _hops(chain: Chain) -> tuple[RouteHop, ...]:
    return tuple(RouteHop(*hop) for hop in chain)
