"""`corolla bootstrap`: a peer of the hash table that others join, without a model."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.leaving import leave_with_parent, run_until_stopped
from corolla.apps.cli.options import (
    exit_with_parent_option,
    identity_option,
    join_option,
    json_option,
    listen_options,
    logging_options,
    split_addresses,
)
from corolla.apps.cli.progress import progress
from corolla.apps.cli.ready import say_ready
from corolla.errors import SwarmError

if TYPE_CHECKING:
    from corolla.net.libp2p.config import NetworkConfig


@click.command("bootstrap")
@join_option
@listen_options
@identity_option
@json_option
@exit_with_parent_option
@logging_options("info")
def command(
    join: tuple[str, ...],
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    identity: Path | None,
    as_json: bool,
    exit_with_parent: bool,
) -> None:
    """Be a peer that others join, without a model.

    Servers and clients find each other through it; their data does not pass it. Prints one line with its address
    once it answers, and runs until interrupted.
    """
    from corolla.apps.cli.network import server_network

    if exit_with_parent:
        leave_with_parent()
    network = server_network(listen=listen, announce=announce, identity=identity)
    peers = split_addresses(join)
    run_until_stopped(lambda stop, ready: _bootstrap(network, peers, stop, ready, as_json=as_json))


async def _bootstrap(
    network: "NetworkConfig", peers: Sequence[str], stop: asyncio.Event, ready: Callable[[], None], *, as_json: bool
) -> None:
    """Be there until `stop` is set. Raises NoPeers, or SwarmError when the network daemon dies."""
    from corolla.apps.cli.network import JOIN_TIMEOUT_S
    from corolla.net.libp2p.transport import open_transport

    async with open_transport(network) as transport:
        if peers:
            with progress("joining the swarm"):
                await transport.join(peers, timeout_s=JOIN_TIMEOUT_S)
        say_ready(transport.peer, None, transport.addresses, as_json=as_json)
        ready()
        stopped = asyncio.ensure_future(stop.wait())
        lost = asyncio.ensure_future(transport.wait_lost())
        try:
            await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                raise SwarmError(f"the network is gone: {lost.result()}")
        finally:
            stopped.cancel()
            lost.cancel()
