"""`corolla serve`: host a span of a model's blocks."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.leaving import leave_with_parent, run_until_stopped
from corolla.apps.cli.options import (
    BlockSpan,
    HostPort,
    exit_with_parent_option,
    identity_option,
    join_option,
    json_option,
    listen_options,
    logging_options,
    source_options,
    split_addresses,
)
from corolla.apps.cli.ready import say_ready

if TYPE_CHECKING:
    from corolla.models.source_options import SourceOptions
    from corolla.server.config import DTypeChoice, QuantizationChoice
    from corolla.server.server import Watch


class Device(click.ParamType[str]):
    """`cpu`, `cuda`, `cuda:N` or `mps`; whether this machine has it is for the server to say."""

    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", value):
            self.fail(f"{value!r} is not one of cpu, cuda, cuda:N, mps", param, ctx)
        return value


@click.command("serve")
@click.argument("model")
@click.option("--blocks", metavar="A:B", type=BlockSpan(), help="Host blocks A to B-1, and stay there.")
@click.option(
    "--num-blocks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Host N blocks, where they help most. Default, without --blocks too: as many as fit into the free memory.",
)
@click.option("--device", metavar="cpu|cuda|cuda:N|mps", type=Device(), default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Number format of weights and cache; auto keeps the checkpoint's own.",
)
@click.option(
    "--quant",
    type=click.Choice(["none", "int8", "nf4"]),
    default="none",
    show_default=True,
    help="Hold the blocks in 8 or 4 bits a weight: less memory, other outputs. Announced.",
)
@join_option
@listen_options
@identity_option
@click.option("--name", default="", help="What `corolla status` calls this server.")
@click.option("--model-name", metavar="NAME", help="Display name of the model. Default: its directory's.")
@click.option(
    "--cache-tokens", type=click.IntRange(min=1), metavar="N", help="KV cache for all sessions together, in tokens."
)
@click.option(
    "--max-session-tokens", type=click.IntRange(min=1), metavar="N", help="Longest session taken. Default: 8192."
)
@click.option(
    "--reserve-for",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Keep a quarter of the server for the peers in this file, one id a line; repeatable. Default: of --allow.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How long a server that leaves goes on serving, for its clients to move away.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    type=HostPort(),
    help="Show numbers for Prometheus at http://HOST:PORT/metrics; /health and /ready beside it.",
)
@source_options
@json_option
@exit_with_parent_option
@logging_options("info")
def command(
    model: str,
    blocks: tuple[int, int] | None,
    num_blocks: int | None,
    device: str,
    dtype: "DTypeChoice",
    quant: "QuantizationChoice",
    join: tuple[str, ...],
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    identity: Path | None,
    name: str,
    model_name: str | None,
    cache_tokens: int | None,
    max_session_tokens: int | None,
    reserve_for: tuple[Path, ...],
    drain_timeout: float,
    metrics: str | None,
    source: "SourceOptions",
    as_json: bool,
    exit_with_parent: bool,
) -> None:
    """Host a span of a model's blocks until interrupted.

    MODEL is a directory of safetensors, a GGUF file, or a hub's OWNER/NAME. Without --join a new swarm begins. Prints
    one line with the address for others to join once it answers requests.
    """
    from corolla.apps.cli.network import chosen_gate_files, server_network
    from corolla.apps.doctor.examine import examine_machine
    from corolla.apps.doctor.swarm import examine_swarm
    from corolla.net.gate import load_allowed
    from corolla.server.config import ServerConfig
    from corolla.server.server import Ready, run_server, tell_finding

    if exit_with_parent:
        leave_with_parent()
    config = ServerConfig(
        model=model, source=source, blocks=blocks, num_blocks=num_blocks, device=device, dtype=dtype,
        quantization=quant, name=name, model_name=model_name, drain_timeout_s=drain_timeout,
    )  # fmt: skip
    if cache_tokens is not None:
        config = replace(config, cache_tokens=cache_tokens)
    if max_session_tokens is not None:
        config = replace(config, limits=replace(config.limits, max_session_tokens=max_session_tokens))
    network = server_network(listen=listen, announce=announce, identity=identity)
    reserved, allowed = load_allowed(reserve_for), network.gate.allowed or frozenset()
    config = replace(config, listed=allowed if reserved is None else reserved)
    network = replace(network, listed=allowed | (reserved or frozenset()))
    for finding in examine_machine(*chosen_gate_files(), identity=identity, cache_dir=source.cache_dir):
        tell_finding(finding)

    def serve(stop: asyncio.Event, ready: Callable[[], None]) -> Awaitable[None]:
        def on_ready(server: Ready) -> None:
            say_ready(server.peer, (server.start, server.end), server.addresses, as_json=as_json)
            ready()

        return run_server(
            config, network, split_addresses(join),
            stop=stop, on_ready=on_ready, check=examine_swarm, watch=None if metrics is None else page_at(metrics),
        )  # fmt: skip

    run_until_stopped(serve)


def page_at(address: str) -> "Watch":
    from corolla.apps.metrics.server import metrics_page
    from corolla.net.libp2p.addresses import parse_host_port

    return partial(metrics_page, parse_host_port(address))
