"""`corolla bench`: what a hop, a token, a start and a lost server cost on this machine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from corolla.apps.cli.leaving import leave_with_parent, run_until_stopped
from corolla.apps.cli.options import exit_with_parent_option, json_option, logging_options
from corolla.apps.cli.ready import say_ready
from corolla.ids import PeerId

rounds_option = click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Runs of each.")


@click.group("bench")
def command() -> None:
    """Measure what a hop, a decoded token and a start cost, side by side with plain transformers."""


@command.command("hop")
@rounds_option
@logging_options("warning")
def hop(rounds: int) -> None:
    """Milliseconds that one more server adds to a decode step, and the echo beneath it."""
    from corolla.apps.bench.hop import run

    run(rounds)


@command.command("decode")
@rounds_option
@click.option("--servers", type=click.Choice(["1", "2", "4"]), default="2", show_default=True)
@logging_options("warning")
def decode(rounds: int, servers: str) -> None:
    """Tokens per second over several servers against plain transformers, alternating."""
    from corolla.apps.bench.decode import run

    run(rounds, int(servers))


@command.command("start")
@rounds_option
@logging_options("warning")
def start(rounds: int) -> None:
    """Seconds from a process's start to its first token, and to a server's ready line."""
    from corolla.apps.bench.start import run

    run(rounds)


@command.command("recovery")
@rounds_option
@logging_options("warning")
def recovery(rounds: int) -> None:
    """How long the text stands still when the server in use is killed, frozen or told to leave."""
    from corolla.apps.bench.recovery import run

    run(rounds)


@command.command("replay")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Texts with losses and without."
)
@click.option("--length", type=click.IntRange(min=64), default=1024, show_default=True, help="Tokens of each text.")
@logging_options("warning")
def replay(rounds: int, length: int) -> None:
    """The rate that is kept when 1 % of requests to a stage lose its state."""
    from corolla.apps.bench.replay import run

    run(rounds, length)


@command.command("near-ties")
@click.option("--texts", type=click.IntRange(1, 30), default=30, show_default=True, help="Texts in each number format.")
@logging_options("warning")
def near_ties(texts: int) -> None:
    """Texts that are others after a replay: in bf16, where two tokens are nearly tied."""
    from corolla.apps.bench.near_ties import run

    run(texts)


@command.command("kills")
@click.option("--in-memory", type=click.IntRange(min=0), default=1000, show_default=True, help="Kills in memory.")
@click.option("--real", type=click.IntRange(min=0), default=20, show_default=True, help="Kills of server processes.")
@logging_options("error")
def kills(in_memory: int, real: int) -> None:
    """One long text while one server after another is killed: differing tokens, and waits."""
    from corolla.apps.bench.kills import run

    run(in_memory, real)


@command.command("wan")
@rounds_option
@logging_options("warning")
def wan(rounds: int) -> None:
    """Decoding and first tokens over 50 ms and 100 Mbit/s (needs root and network namespaces)."""
    from corolla.apps.bench.wan import run

    run(rounds)


@command.command("wan-client", hidden=True)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("address")
@rounds_option
@logging_options("warning")
def wan_client(model: Path, address: str, rounds: int) -> None:
    """The client of `bench wan`, on a host of its own."""
    from corolla.apps.bench.wan import measure

    click.echo(measure(model, address, rounds))


@command.command("echo-peer", hidden=True)
@json_option
@exit_with_parent_option
@logging_options("warning")
def echo_peer(as_json: bool, exit_with_parent: bool) -> None:
    """The other end of `bench hop`'s echo."""
    from corolla.apps.bench.echo import serve_echo

    if exit_with_parent:
        leave_with_parent()

    def serve(stop: asyncio.Event, ready: Callable[[], None]) -> Awaitable[None]:
        def on_ready(peer: PeerId, addresses: tuple[str, ...]) -> None:
            say_ready(peer, None, addresses, as_json=as_json)
            ready()

        return serve_echo(stop, on_ready)

    run_until_stopped(serve)
