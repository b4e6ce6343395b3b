"""How `corolla route` shows a chain: a line for each server, with every term of its cost when asked for.

Names come from strangers and are printed as `Text`, never as markup (see `status_table.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.apps.cli.route import LeftOut, PricedRoute
from corolla.apps.cli.status_table import PLAIN_WIDTH
from corolla.apps.status.reading import ModelStatus
from corolla.ids import PeerId, short
from corolla.swarm.chain import HopPrice

TERMS = ("travel", "bytes", "overhead", "queue", "compute", "penalty", "total")


def print_route(
    status: ModelStatus,
    routes: Sequence[PricedRoute],
    *,
    explain: bool,
    left_out: Sequence[LeftOut] = (),
    prompt_tokens: int = 1,
    console: Console | None = None,
) -> None:
    """The best chain; with `explain` its terms, what they mean, the runner-up, and who was left out."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    best, others = routes[0], routes[1:]
    if prompt_tokens > 1:
        console.print(f"with a prompt of {prompt_tokens} tokens, whose bytes are spread over the steps of an answer")
    console.print(_headline(status, best, "route"))
    console.print(_table(status, best, with_terms=explain))
    if not explain:
        return
    for other in others:
        console.print(_headline(status, other, "runner-up"))
        console.print(_table(status, other, with_terms=True))
    if not others:
        console.print("no other chain covers every block")
    for server in left_out:
        console.print(Text(f"left out: {server}"))
    console.print(
        "travel: one way from the hop before, as measured by it, or over this client. bytes: what a step's bytes take "
        "on a link whose capacity is known, with a step's share of the prompt's. queue: how long a step waits there. "
        "penalty: no room for the session, or a server that is leaving."
    )


def print_json(status: ModelStatus, routes: Sequence[PricedRoute], left_out: Sequence[LeftOut] = ()) -> None:
    said = {
        "name": status.entry.name,
        "fingerprint": status.entry.fingerprint,
        "routes": [_as_json(route) for route in routes],
        "left_out": [asdict(server) for server in left_out],
    }
    click.echo(json.dumps(said, ensure_ascii=False, indent=2))


def _headline(status: ModelStatus, priced: PricedRoute, what: str) -> Text:
    step_s = priced.price.total_s - priced.price.penalty_s
    text = Text.assemble((status.entry.name, "bold"), f": {what} over {len(priced.route.hops)} server(s), ")
    text.append(f"{1000 * step_s:.1f} ms a step")
    text.append(f", {1 / step_s:.1f} tokens a second" if step_s > 0 else "")
    return text.append("; it has no room for the session, or leaves" if priced.price.penalty_s else "")


def _table(status: ModelStatus, priced: PricedRoute, *, with_terms: bool) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("blocks", "server", "name"):
        table.add_column(name, no_wrap=name != "name")
    shown = _shown_terms(priced) if with_terms else ()
    for name in shown:
        table.add_column(f"{name} ms", justify="right", no_wrap=True)
    for hop in priced.price.hops:
        terms = _terms(hop)
        table.add_row(*(Text(cell) for cell in (*_who(status, hop), *(_ms(terms[name]) for name in shown))))
    if with_terms:
        back_s = priced.price.return_s
        table.add_row("", "back to you", "", _ms(back_s), *[""] * (len(shown) - 2), _ms(back_s))
    return table


def _shown_terms(priced: PricedRoute) -> list[str]:
    """Capacities are known of few links; elsewhere the column would only take the names' room."""
    return [name for name in TERMS if name != "bytes" or any(hop.transfer_s for hop in priced.price.hops)]


def _who(status: ModelStatus, hop: HopPrice) -> tuple[str, str, str]:
    return f"{hop.hop.start}:{hop.hop.end}", f"…{short(hop.hop.peer)}", _name_of(status, hop.hop.peer)


def _name_of(status: ModelStatus, peer: PeerId) -> str:
    return status.view.servers[peer].announcement.name


def _terms(hop: HopPrice) -> dict[str, float]:
    seconds = hop.travel_s, hop.transfer_s, hop.overhead_s, hop.queue_s, hop.compute_s, hop.penalty_s, hop.total_s
    return dict(zip(TERMS, seconds, strict=True))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _as_json(priced: PricedRoute) -> dict[str, Any]:
    return {
        "cost_s": priced.price.total_s,
        "return_s": priced.price.return_s,
        "hops": [
            {
                "peer": hop.hop.peer,
                "blocks": f"{hop.hop.start}:{hop.hop.end}",
                **{f"{term}_s": seconds for term, seconds in _terms(hop).items()},
            }
            for hop in priced.price.hops
        ],
    }
