"""How `corolla status` shows a swarm: tables for people, JSON for programs.

Names come from strangers. `swarm/announcement.py` has refused what cannot be printed; here they are `Text`, never
strings with markup, so that a server called `[red]` is just that.
"""

import json
import math
from collections.abc import Sequence

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.apps.status.facts import alone_on, as_json, in_order, missing_blocks
from corolla.apps.status.reading import ModelStatus
from corolla.errors import as_ranges
from corolla.ids import short
from corolla.swarm.view import Health, ServerView

STYLES: dict[Health, str] = {"healthy": "green", "fragile": "yellow", "broken": "red"}
PLAIN_WIDTH = 120
"""Columns when the output is no terminal."""
ROOMY_WIDTH = 100
MAP_WIDTH = 64
"""Blocks in a line of the map."""
MAX_NAMED = 4
"""Servers that the headline names; the table has them all."""


def print_tables(statuses: Sequence[ModelStatus], console: Console | None = None) -> None:
    """One table for each model."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if not statuses:
        console.print("nobody serves a model in this swarm")
    for status in statuses:
        console.print(headline(status))
        if status.view.servers:
            console.print(block_map(status.counted.coverage))
            console.print(_table(status, console.width))
            console.print()


def headline(status: ModelStatus) -> Text:
    """`NAME: healthy, 30 blocks (fingerprint 0123…)`, with what is missing or fragile."""
    health = status.counted.health
    text = Text.assemble((status.entry.name, "bold"), ": ", (health, STYLES[health]))
    text.append(f", {status.entry.num_blocks} blocks, fingerprint {status.entry.fingerprint[:12]}")
    if missing := missing_blocks(status):
        text.append(f"; no server for {as_ranges(missing)}")
    if status.silent:
        silent = [server for server in in_order(status.view) if server.peer in status.silent]
        text.append("; no answer from " + ", ".join(f"{s.start}:{s.end} {_called(s)}" for s in silent[:MAX_NAMED]))
        text.append(f" and {len(silent) - MAX_NAMED} servers more" if len(silent) > MAX_NAMED else "")
    if alone := alone_on(status.counted):
        text.append(
            "; on one server only: " + ", ".join(_alone(server, blocks) for server, blocks in alone[:MAX_NAMED])
        )
        text.append(f" and {len(alone) - MAX_NAMED} servers more" if len(alone) > MAX_NAMED else "")
    if status.rejected:
        reasons = ", ".join(f"{reason} ({times})" for reason, times in sorted(status.rejected.items()))
        text.append(f"; announcements dropped: {reasons}")
    return text


def _alone(server: ServerView, blocks: Sequence[int]) -> str:
    return f"{as_ranges(blocks)} {_called(server)}"


def _called(server: ServerView) -> str:
    name = server.announcement.name
    return f"(…{short(server.peer)}{' ' + name if name else ''})"


def block_map(coverage: Sequence[int]) -> Text:
    """One character for each block: how many online servers host it, `·` for none and `+` for more than nine."""
    text = Text()
    for first in range(0, len(coverage), MAP_WIDTH):
        text.append(f"{first:>5}  ", "dim")
        for count in coverage[first : first + MAP_WIDTH]:
            sign = "·" if count == 0 else str(count) if count < 10 else "+"
            text.append(sign, STYLES["broken" if count == 0 else "fragile" if count == 1 else "healthy"])
        text.append("\n")
    text.rstrip()
    return text


def print_json(statuses: Sequence[ModelStatus], *, indent: int | None = 2) -> None:
    """One document; without `indent` on one line, so that a program can read document after document."""
    click.echo(json.dumps({"models": [as_json(status) for status in statuses]}, ensure_ascii=False, indent=indent))


def _table(status: ModelStatus, width: int) -> Table:
    """Fits into 80 columns; there a long name goes on in the next line."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1) if width >= ROOMY_WIDTH else 0, show_edge=False)
    for name in ("blocks", "server", "name", "state", "dtype"):
        table.add_column(name, no_wrap=name != "name", overflow="fold")
    for name in ("tokens/s", "cache", "queue ms", "rtt ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for server in in_order(status.view):
        table.add_row(*(Text(cell) for cell in _cells(server)))
    return table


def _cells(server: ServerView) -> tuple[str, ...]:
    said = server.announcement
    return (
        f"{server.start}:{server.end}",
        f"…{short(server.peer)}",
        said.name,
        f"{said.state}, to {said.moving_to[0]}:{said.moving_to[1]}" if said.moving_to else said.state,
        f"{said.dtype} {said.quantization}" if said.quantization else said.dtype,
        f"{said.decode_tokens_per_s:.1f}" if said.decode_tokens_per_s else "–",
        f"{said.free_cache_tokens}",
        f"{said.queue_s * 1000:.0f}",
        _rtt(server.rtt_s),
    )


def _rtt(rtt_s: float | None) -> str:
    """In a swarm of more than a few dozen servers not all are asked."""
    if rtt_s is None:
        return "–"
    return "no answer" if math.isinf(rtt_s) else f"{rtt_s * 1000:.1f}"
