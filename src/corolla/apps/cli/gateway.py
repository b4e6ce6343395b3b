"""`corolla gateway`: an OpenAI-compatible endpoint, and the pages, over a swarm."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.leaving import leave_with_parent, run_until_stopped
from corolla.apps.cli.options import (
    HostPort,
    client_identity_option,
    exit_with_parent_option,
    join_option,
    json_option,
    logging_options,
    require_peers,
    server_list_options,
    source_options,
)
from corolla.apps.cli.privacy import say_privacy_note

if TYPE_CHECKING:
    from corolla.models.source_options import SourceOptions


@click.command("gateway")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@join_option
@client_identity_option
@server_list_options
@click.option(
    "--listen",
    metavar="HOST:PORT",
    type=HostPort(),
    default="127.0.0.1:8000",
    show_default=True,
    help="Address to listen on; port 0 takes a free one.",
)
@click.option(
    "--api-keys",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Hashed API keys, one a line, as `corolla key api` makes them. COROLLA_API_KEYS may hold keys themselves.",
)
@click.option("--no-keys", is_flag=True, help="Serve whoever reaches an address beyond this machine, without keys.")
@click.option("--cors", metavar="ORIGIN", multiple=True, help="Let pages of this origin use the gateway; repeatable.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Number format of the local half and of what is sent; auto keeps the checkpoint's own.",
)
@click.option(
    "--max-active", type=click.IntRange(1, 4096), default=64, show_default=True, help="Answers written at a time."
)
@click.option(
    "--max-waiting", type=click.IntRange(0, 65536), default=256, show_default=True, help="Requests in line behind them."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Longest answer to a request that does not say.",
)
@click.option(
    "--keep-sessions",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="How long servers hold a conversation for its next message.",
)
@source_options
@json_option
@exit_with_parent_option
@logging_options("info")
def command(
    models: tuple[str, ...],
    join: tuple[str, ...],
    listen: str,
    api_keys: Path | None,
    no_keys: bool,
    cors: tuple[str, ...],
    dtype: str,
    max_active: int,
    max_waiting: int,
    max_new_tokens: int,
    keep_sessions: float,
    source: "SourceOptions",
    as_json: bool,
    exit_with_parent: bool,
) -> None:
    """Answer OpenAI's API over a swarm, with pages that show it.

    The API is at /v1/, the pages at /. MODEL is a directory of safetensors, a GGUF file, or a hub's OWNER/NAME; several
    may be served by one gateway.

    Embeddings and head are loaded here, so callers need no weights. Prints one line with the address once it answers.
    """
    from corolla.apps.cli.network import chosen_servers, client_network
    from corolla.apps.gateway.config import GatewayConfig
    from corolla.apps.gateway.keys import KEYS_VARIABLE, load_keys
    from corolla.apps.gateway.serving import LOOPBACK, GatewayOptions, run_gateway
    from corolla.client.config import ClientConfig
    from corolla.net.libp2p.addresses import parse_host_port

    if exit_with_parent:
        leave_with_parent()
    peers = require_peers(join)
    keys = load_keys(api_keys, os.environ.get(KEYS_VARIABLE, ""))
    address = parse_host_port(listen)
    is_local = address.host in LOOPBACK and not keys.by_hash
    config = GatewayConfig(
        keys=keys,
        max_active=max_active,
        max_waiting=max_waiting,
        default_new_tokens=max_new_tokens,
        keep_s=keep_sessions,
        cors_origins=cors,
        hosts=("127.0.0.1", "localhost", "[::1]") if is_local else None,
    )
    options = GatewayOptions(models, address, source, None if dtype == "auto" else dtype, is_for_anyone=no_keys)
    client, network = ClientConfig(servers=chosen_servers()), client_network()

    def serve(stop: asyncio.Event, ready: Callable[[], None]) -> Awaitable[None]:
        def on_ready(url: str) -> None:
            click.echo(json.dumps({"url": url}) if as_json else f"ready url={url}")
            ready()

        return run_gateway(options, config, client, network, peers, stop=stop, on_ready=on_ready)

    say_privacy_note()
    run_until_stopped(serve)
