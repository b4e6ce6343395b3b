"""`corolla route`: which chain of servers a session would take now, and why."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import (
    client_identity_option,
    join_option,
    json_option,
    logging_options,
    require_peers,
    server_list_options,
)
from corolla.apps.cli.progress import progress
from corolla.apps.cli.status import ask_swarm
from corolla.errors import BadInput, MissingBlocks
from corolla.ids import PeerId, short

if TYPE_CHECKING:
    from corolla.apps.status.reading import ModelStatus
    from corolla.swarm.chain import Route, RoutePrice
    from corolla.swarm.cost import CostModel
    from corolla.swarm.view import View

USUAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PricedRoute:
    """A chain and the terms of its cost."""

    route: "Route"
    price: "RoutePrice"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A server that no route may use, and why."""

    peer: PeerId
    name: str
    blocks: str
    why: str

    def __str__(self) -> str:
        return f"{self.blocks} …{short(self.peer)} {self.name}".rstrip() + f": {self.why}"


@click.command("route")
@click.argument("model")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help=f"Length of the session. Default: {USUAL_TOKENS}, or as long as any server takes.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=1,
    help="Length of the prompt that the session begins with: a long one makes thin links count. Default: 1.",
)
@click.option("--explain", is_flag=True, help="Show what each part costs, and the best other chain.")
@join_option
@client_identity_option
@server_list_options
@json_option
@logging_options("warning")
def command(
    model: str, tokens: int | None, prompt_tokens: int, explain: bool, join: tuple[str, ...], as_json: bool
) -> None:
    """Show which servers a session would use now, and what each of them costs.

    Seen from here. MODEL is a model's name, or the beginning of its fingerprint. Routes that cost nearly the same
    (5 %) are taken at random, so that clients spread; this shows the cheapest.
    """
    peers = require_peers(join)
    with progress("asking the swarm"):
        statuses = asyncio.run(ask_swarm(peers, [model]))
    from corolla.apps.cli.network import chosen_servers
    from corolla.apps.cli.route_table import print_json, print_route
    from corolla.swarm.cost import CostModel

    status = only_one(statuses, model)
    servers = chosen_servers()
    left_out = left_out_of(status.view, servers.left_out(status.view))
    status = replace(status, view=servers.applied(status.view))
    tokens = session_tokens(status, tokens, prompt_tokens)
    left_out += left_out_of(status.view, too_short(status.view, tokens))
    status = replace(status, view=status.view.taking(tokens))
    cost = CostModel().for_session(prompt_tokens=prompt_tokens, max_tokens=tokens)
    try:
        routes = best_routes(status, tokens, cost)
    except MissingBlocks as missing:
        raise MissingBlocks(missing.blocks, "; ".join(f"left out: {server}" for server in left_out)) from None
    if as_json:
        print_json(status, routes, left_out)
    else:
        print_route(status, routes, explain=explain, left_out=left_out, prompt_tokens=prompt_tokens)


def left_out_of(view: "View", reasons: Mapping[PeerId, str]) -> list[LeftOut]:
    """Servers that the user's choices leave out, with what people know them by."""
    servers = [(view.servers[peer], why) for peer, why in reasons.items()]
    return [
        LeftOut(server.peer, server.announcement.name, f"{server.start}:{server.end}", why) for server, why in servers
    ]


def too_short(view: "View", tokens: int) -> dict[PeerId, str]:
    """The servers that take no session of so many tokens, as a session leaves them out, too."""
    kept = view.taking(tokens).servers
    return {
        peer: f"takes sessions of {server.longest_session:.0f} tokens at most"
        for peer, server in view.servers.items()
        if peer not in kept
    }


def only_one(statuses: Sequence["ModelStatus"], name: str) -> "ModelStatus":
    """The model that was meant. Raises BadInput when several are called that."""
    if len(statuses) > 1:
        prints = ", ".join(status.entry.fingerprint[:12] for status in statuses)
        raise BadInput(f"{len(statuses)} models are called {name}; name one by its fingerprint: {prints}")
    return statuses[0]


def usual_tokens(status: "ModelStatus") -> int:
    """A usual length of session, but not longer than every server refuses."""
    longest = [server.announcement.max_session_tokens for server in status.view.servers.values()]
    return min(USUAL_TOKENS, max(longest)) if longest and all(longest) else USUAL_TOKENS


def session_tokens(status: "ModelStatus", tokens: int | None, prompt_tokens: int) -> int:
    """The length of the session that is asked about; unless told, the prompt and at least a usual answer fit in.

    Raises BadInput when the prompt does not.
    """
    from corolla.swarm.cost import CostModel

    usual = usual_tokens(status)
    if tokens is None:
        is_long = 2 * prompt_tokens > usual
        return max(usual, prompt_tokens + CostModel().usual_new_tokens) if is_long else usual
    if prompt_tokens > tokens:
        raise BadInput(f"a prompt of {prompt_tokens} tokens does not fit into a session of {tokens}; raise --tokens")
    return tokens


def best_routes(status: "ModelStatus", tokens: int, cost: "CostModel") -> list[PricedRoute]:
    """The cheapest chain and the runner-up, if there is one. Raises MissingBlocks."""
    from corolla.swarm.chain import price_route
    from corolla.swarm.route import find_routes

    priced = list[PricedRoute]()
    for route in find_routes(status.view, status.entry.num_blocks, cost, tokens_needed=tokens, count=2):
        price = price_route(status.view, route.hops, cost, tokens_needed=tokens)
        assert price is not None, "a route just found in this view has a price in it"
        priced.append(PricedRoute(route, price))
    return priced
