"""The command line's frame: finds the command, runs it, turns what goes wrong into a sentence and an exit code.

Each command is a module beside this one, imported only when it is called for: `corolla --help` knows the
commands by the table below and imports neither torch nor hivemind (a test holds this).

Exit codes are those of `errors.py`; 2 also for a wrong flag, 130 after Ctrl-C. Standard output belongs to the
command's result; everything else goes to standard error.
"""

import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from corolla.apps.cli.settings import RunSettings
from corolla.errors import SwarmError

COMMANDS: dict[str, str] = {
    "serve": "Host a span of a model's blocks until interrupted.",
    "bootstrap": "Be a peer that others join, without a model.",
    "generate": "Continue a prompt, or answer it, with a model served by a swarm.",
    "chat": "Hold a conversation with a model served by a swarm.",
    "gateway": "Answer OpenAI's API over a swarm, with pages that show it.",
    "trace": "Show where the time of a gateway's latest answers went.",
    "status": "Show who serves which models, and whether they are whole.",
    "route": "Show which servers a session would use now, and what each of them costs.",
    "inspect": "Tell what a model is and takes: family, blocks, memory, download, cache, possible cuts.",
    "doctor": "Check this machine and its place in a swarm.",
    "key": "Make the key of a private swarm, or an API key for a gateway.",
    "demo": "Run a small real model over three server processes on this machine.",
    "bench": "Measure what a hop, a decoded token and a start cost, side by side with plain transformers.",
}
"""Command → its first help line. The module `corolla.apps.cli.<command>` holds it as `command`."""

INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that lists its commands from the table and imports one when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def load_command(name: str) -> click.Command:
    command = importlib.import_module(f"corolla.apps.cli.{name}").command
    assert isinstance(command, click.Command)
    return command


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from corolla import __version__

        click.echo(f"corolla {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Run large language models over many machines, none of which could hold the model alone.

    Servers host spans of a model's blocks and find each other through any peer that they --join; a client takes
    the fastest chain of servers. `corolla COMMAND --help` says more.
    """


def main() -> NoReturn:
    """Entry point of the `corolla` program."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    settings = RunSettings()
    try:
        result: object = cli.main(list(arguments), prog_name="corolla", standalone_mode=False, obj=settings)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the root of everything: what comes here ends the program
        return _report(error, show_traceback=settings.debug)
    return result if isinstance(result, int) else 0


def _report(error: Exception, *, show_traceback: bool) -> int:
    """Say on standard error what went wrong; the exit code."""
    if show_traceback:
        traceback.print_exception(error)
    cause = find_cause(error)
    if isinstance(cause, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(cause, SwarmError):
        click.echo(f"Error: {cause}", err=True)
        return cause.exit_code
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        click.echo(f"Error: no space left on the disk{f' for {cause.filename}' if cause.filename else ''}", err=True)
        return 1
    click.echo(
        f"Error: something unexpected happened ({type(cause).__name__}: {cause}); please report it, with what the "
        "same command says under --debug",
        err=True,
    )
    return 1


def find_cause(error: BaseException) -> BaseException:
    """What to tell the user out of an error group: our own typed error if there is one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [find_cause(inner) for inner in error.exceptions]  # pyright: ignore[reportUnknownVariableType]
    for kind in (SwarmError, KeyboardInterrupt):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]
