"""`corolla status`: who serves what in a swarm, and whether each model is whole."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import join_option, json_option, logging_options, require_peers
from corolla.apps.cli.progress import progress
from corolla.errors import HopFailed, NoRoute

if TYPE_CHECKING:
    from corolla.ids import PeerId
    from corolla.net.streams import Transport
    from corolla.swarm.announcement import ModelEntry
    from corolla.swarm.view import View

JOIN_TIMEOUT_S = 15.0
PING_TIMEOUT_S = 2.0
PINGS = 2
"""The first may have to dial: the least of them counts."""
MAX_PINGED = 64
FRAGILE_CODE, BROKEN_CODE = 10, 11
"""Apart from the exit codes of errors (`errors.py`)."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of the swarm and its servers, with round trips as measured from here."""

    entry: "ModelEntry"
    view: "View"


@click.command("status")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--watch", is_flag=True, help="Look again every few seconds, until interrupted.")
@click.option(
    "--every", metavar="SECONDS", type=click.FloatRange(min=1), default=5.0, show_default=True, help="With --watch."
)
@click.option("--exit-code", is_flag=True, help="Exit with 10 when a model is fragile, 11 when one is broken.")
@join_option
@json_option
@logging_options("warning")
def command(
    models: tuple[str, ...], watch: bool, every: float, exit_code: bool, join: tuple[str, ...], as_json: bool
) -> int:
    """Show who serves which models, and whether they are whole.

    A model is healthy, fragile (some block is on one server only) or broken (some block is on none). MODEL is a
    model's name, or the beginning of its fingerprint; without any, all models are shown.
    """
    peers = require_peers(join)
    if watch:
        asyncio.run(_watch(peers, models, every, as_json=as_json))
    with progress("asking the swarm"):
        statuses = asyncio.run(ask_swarm(peers, models))
    from corolla.apps.cli.status_table import print_json, print_tables

    print_json(statuses) if as_json else print_tables(statuses)
    return health_code(statuses) if exit_code else 0


def health_code(statuses: Sequence[ModelStatus]) -> int:
    """The exit code of the worst of these models; nobody serving anything is broken, too."""
    health = {status.view.health for status in statuses}
    if not health or "broken" in health:
        return BROKEN_CODE
    return FRAGILE_CODE if "fragile" in health else 0


async def ask_swarm(peers: Sequence[str], wanted: Sequence[str]) -> list[ModelStatus]:
    """Join for a moment and read the status of the wanted models. Raises NoPeers or NoRoute."""
    async with _joined(peers) as transport:
        return await read_swarm(transport, wanted)


async def _watch(peers: Sequence[str], wanted: Sequence[str], period_s: float, *, as_json: bool) -> None:
    """Show the swarm again and again, as one peer that stays."""
    from corolla.apps.cli.status_table import print_json, print_tables

    async with _joined(peers) as transport:
        while True:
            statuses = await read_swarm(transport, wanted)
            if as_json:
                print_json(statuses, indent=None)
            else:
                click.clear()  # does nothing where the output is no terminal
                print_tables(statuses)
            await asyncio.sleep(period_s)


@asynccontextmanager
async def _joined(peers: Sequence[str]) -> "AsyncIterator[Transport]":
    from corolla.apps.cli.network import client_network
    from corolla.net.libp2p.transport import open_transport

    async with open_transport(client_network()) as transport:
        await transport.join(peers, timeout_s=JOIN_TIMEOUT_S)
        yield transport


async def read_swarm(transport: "Transport", wanted: Sequence[str]) -> list[ModelStatus]:
    """The status of the wanted models (none named: all). Raises NoRoute when a named one is not served."""
    from corolla.swarm.announcement import MODELS_KEY
    from corolla.swarm.watch import Watcher, list_models

    entries = choose(list_models(await transport.records.get(MODELS_KEY)), wanted)
    views = await asyncio.gather(*(Watcher(transport, entry.fingerprint).refresh() for entry in entries))
    rtts = await _ping_all(transport, [peer for view in views for peer in view.servers])
    return [ModelStatus(entry, view.with_rtts(rtts)) for entry, view in zip(entries, views, strict=True)]


def choose(entries: Sequence["ModelEntry"], wanted: Sequence[str]) -> list["ModelEntry"]:
    """The entries that the user named, by name or beginning of the fingerprint. Raises NoRoute for an unknown one."""
    for name in wanted:
        if not any(_is_called(entry, name) for entry in entries):
            served = ", ".join(entry.name for entry in entries) or "nothing"
            raise NoRoute(f"nobody serves {name} in this swarm; served: {served}")
    return [entry for entry in entries if not wanted or any(_is_called(entry, name) for name in wanted)]


def _is_called(entry: "ModelEntry", name: str) -> bool:
    return bool(name) and (entry.name == name or entry.fingerprint.startswith(name))


async def _ping_all(transport: "Transport", peers: Sequence["PeerId"]) -> dict["PeerId", float]:
    """Round trips in seconds of those that answer in time."""

    async def ping(peer: "PeerId") -> float | None:
        try:
            return min([await transport.ping(peer, timeout_s=PING_TIMEOUT_S) for _ in range(PINGS)])
        except HopFailed:
            return None

    asked = list(dict.fromkeys(peers))[:MAX_PINGED]
    answers = await asyncio.gather(*(ping(peer) for peer in asked))
    return {peer: rtt_s for peer, rtt_s in zip(asked, answers, strict=True) if rtt_s is not None}
