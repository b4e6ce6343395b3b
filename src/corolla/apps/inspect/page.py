"""A model's description as a page for people and as JSON for programs."""

from dataclasses import asdict
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from corolla.models.description import ModelDescription, SpanNeeds

PLAIN_WIDTH = 120
"""Columns when the output is no terminal."""


def as_json(model: ModelDescription, blocks: tuple[int, int] | None, context: int) -> dict[str, Any]:
    """Everything, in bytes."""
    spans = [_span_json(name, needs, context) for name, needs in spans_to_show(model, blocks)]
    return {**asdict(model), "context": context, "spans": spans}


def _span_json(blocks: str, needs: SpanNeeds, context: int) -> dict[str, Any]:
    cache_bytes = needs.cache_bytes(context)
    return {
        "blocks": blocks,
        "weight_bytes": needs.weight_bytes,
        "download_bytes": needs.download_bytes,
        "cache_bytes": cache_bytes,
        "memory_bytes": needs.weight_bytes + cache_bytes,
    }


def spans_to_show(model: ModelDescription, blocks: tuple[int, int] | None) -> list[tuple[str, SpanNeeds]]:
    """The span asked for; else 1, 2, 4, … blocks and all, at their largest, without what cannot be cut out."""
    if blocks is not None:
        return [(f"{blocks[0]}:{blocks[1]}", model.span(*blocks))]
    counts = [1 << power for power in range(model.num_blocks.bit_length()) if 1 << power < model.num_blocks]
    spans = [(count, model.largest_span(count)) for count in [*counts, model.num_blocks]]
    return [(str(count), needs) for count, needs in spans if needs is not None]


def print_page(
    model: ModelDescription, blocks: tuple[int, int] | None, context: int, console: Console | None = None
) -> None:
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    held = model.dtype if model.quantization == "none" else f"{model.quantization} (the rest {model.dtype})"
    click.echo(f"{model.name}: {model.family}, {model.num_blocks} blocks, held as {held}")
    for name, value in _facts(model):
        click.echo(f"  {name:<18}{value}")
    console.print(_table(model, blocks, context))


def _facts(model: ModelDescription) -> list[tuple[str, str]]:
    per_row = sum(needs.bytes_per_row for needs in model.block_cache)
    bounded = sum(needs.most_tokens is not None for needs in model.block_cache)
    more = f", and {size(per_row)} a sequence" if per_row else ""
    more += f"; {bounded} blocks stop growing at their window" if bounded else ""
    commit = [("commit", model.commit)] if model.commit else []
    return [
        *commit,
        ("a block", f"{_range(model.block_bytes)} in memory, {_range(model.block_download_bytes)} to download"),
        ("KV cache", f"{size(sum(needs.bytes_per_token for needs in model.block_cache))} a token for all blocks{more}"),
        ("between blocks", f"{size(model.width * _item_bytes(model.dtype))} a token"),
        ("can be cut", _cuts(model)),
        ("servers need", "token ids: they can read prompts and replies" if model.needs_token_ids else "hidden states"),
        ("can go back", "yes" if model.can_go_back else "no: speculation and edits rebuild the session"),
        ("longest context", "no bound" if model.max_positions is None else f"{model.max_positions} tokens"),
        ("a client holds", f"{size(model.client_bytes)} (embeddings, norm, head)"),
        (
            "a server, besides",
            f"{size(model.side_bytes)} of weights outside the blocks" if model.side_bytes else "nothing",
        ),
    ]


def _cuts(model: ModelDescription) -> str:
    if len(model.cuts) == model.num_blocks - 1:
        return "everywhere"
    return ", ".join(str(cut) for cut in model.cuts) or "nowhere: one server must host all blocks"


def _table(model: ModelDescription, blocks: tuple[int, int] | None, context: int) -> Table:
    table = Table(box=SIMPLE, title=None)
    for heading in ("blocks", "weights", "download", f"cache of {context} tokens", "memory"):
        table.add_column(heading, justify="right")
    for name, needs in spans_to_show(model, blocks):
        cache_bytes = needs.cache_bytes(context)
        cells = (needs.weight_bytes, needs.download_bytes, cache_bytes, needs.weight_bytes + cache_bytes)
        table.add_row(name, *(size(cell) for cell in cells))
    return table


def _range(sizes: tuple[int, ...]) -> str:
    least, most = min(sizes), max(sizes)
    return size(most) if size(least) == size(most) else f"{size(least)} to {size(most)}"


def _item_bytes(dtype: str) -> int:
    return {"float32": 4, "float64": 8}.get(dtype, 2)


def size(num_bytes: int) -> str:
    """Bytes in decimal units, three digits: `7.08 MB`."""
    number, units = float(num_bytes), ["B", "KB", "MB", "GB", "TB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{number:.3g} {units[0]}"
