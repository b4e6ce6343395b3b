"""`corolla status`: who serves what in a swarm, and whether each model is whole."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import client_identity_option, join_option, json_option, logging_options, require_peers
from corolla.apps.cli.progress import progress

if TYPE_CHECKING:
    from corolla.apps.status.reading import ModelStatus
    from corolla.net.streams import Transport

JOIN_TIMEOUT_S = 15.0
FRAGILE_CODE, BROKEN_CODE = 10, 11
"""Apart from the exit codes of errors (`errors.py`)."""


@click.command("status")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--watch", is_flag=True, help="Look again every few seconds, until interrupted.")
@click.option(
    "--every", metavar="SECONDS", type=click.FloatRange(min=1), default=5.0, show_default=True, help="With --watch."
)
@click.option("--exit-code", is_flag=True, help="Exit with 10 when a model is fragile, 11 when one is broken.")
@join_option
@client_identity_option
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


def health_code(statuses: Sequence["ModelStatus"]) -> int:
    """The exit code of the worst of these models; nobody serving anything is broken, too."""
    health = {status.counted.health for status in statuses}
    if not health or "broken" in health:
        return BROKEN_CODE
    return FRAGILE_CODE if "fragile" in health else 0


async def ask_swarm(peers: Sequence[str], wanted: Sequence[str]) -> "list[ModelStatus]":
    """Join for a moment and read the status of the wanted models. Raises NoPeers or NoRoute."""
    from corolla.apps.status.reading import read_swarm

    async with _joined(peers) as transport:
        return await read_swarm(transport, wanted)


async def _watch(peers: Sequence[str], wanted: Sequence[str], period_s: float, *, as_json: bool) -> None:
    """Show the swarm again and again, as one peer that stays.

    Raises NoRoute when a wanted model is not there at first; one that goes later may come back, and is waited for.
    """
    from corolla.apps.cli.status_table import print_json, print_tables
    from corolla.apps.status.reading import read_swarm, unserved

    async with AsyncExitStack() as stack:
        with progress("asking the swarm"):
            transport = await stack.enter_async_context(_joined(peers))
            statuses = await read_swarm(transport, wanted)
        while True:
            if as_json:
                print_json(statuses, indent=None)
            else:
                click.clear()  # does nothing where the output is no terminal
                if statuses or not wanted:
                    print_tables(statuses)
            for name in unserved([status.entry for status in statuses], wanted):
                click.echo(f"nobody serves {name} now; looking again every {period_s:g} s", err=as_json)
            await asyncio.sleep(period_s)
            statuses = await read_swarm(transport, wanted, may_lack=True)


@asynccontextmanager
async def _joined(peers: Sequence[str]) -> "AsyncIterator[Transport]":
    from corolla.apps.cli.network import client_network
    from corolla.net.libp2p.transport import open_transport

    async with open_transport(client_network()) as transport:
        await transport.join(peers, timeout_s=JOIN_TIMEOUT_S)
        yield transport
