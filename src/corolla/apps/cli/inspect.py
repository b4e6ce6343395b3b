"""`corolla inspect`: what a model is and takes, before any of its weights are downloaded."""

import json
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import BlockSpan, json_option, logging_options, source_options
from corolla.apps.cli.progress import progress

if TYPE_CHECKING:
    from corolla.models.quantization import Quantization
    from corolla.models.source_options import SourceOptions

DEFAULT_CONTEXT = 8192


@click.command("inspect")
@click.argument("model")
@click.option("--blocks", metavar="A:B", type=BlockSpan(), help="Tell of blocks A to B-1. Default: of several sizes.")
@click.option(
    "--context", metavar="N", type=click.IntRange(min=1), default=DEFAULT_CONTEXT, show_default=True,
    help="Tokens in the cache that is counted in.",
)  # fmt: skip
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
    help="As `corolla serve --quant` would hold the blocks.",
)
@source_options
@json_option
@logging_options("warning")
def command(
    model: str,
    blocks: tuple[int, int] | None,
    context: int,
    dtype: str,
    quant: "Quantization",
    source: "SourceOptions",
    as_json: bool,
) -> None:
    """Tell what a model is and takes: family, blocks, memory, download, cache, possible cuts.

    MODEL is a directory of safetensors, a GGUF file, or a hub's OWNER/NAME. Of a hub's repository only the
    configuration and the headers of its files are read. Memory is that of weights and of one session's cache; a server
    takes some 0.5 GB for itself besides.
    """
    from corolla.models.frugal import import_modeling
    from corolla.models.source import open_model_source

    with progress("looking the model over") as shown:
        checkpoint = open_model_source(model, source, progress=shown.progress, say=shown.say)
    import_modeling()  # takes seconds, and what cannot be opened can be said before
    import torch

    from corolla.apps.inspect import page
    from corolla.models.description import describe_model
    from corolla.models.loading import check_span

    if blocks is not None:
        check_span(checkpoint, *blocks)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    description = describe_model(checkpoint, dtype=kind, quantization=quant)
    context = min(context, checkpoint.max_positions or context)
    if as_json:
        click.echo(json.dumps(page.as_json(description, blocks, context)))
    else:
        page.print_page(description, blocks, context)
