"""`corolla chat`: a conversation on the terminal that keeps one session, so that no turn is sent twice."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import (
    client_identity_option,
    exact_option,
    join_option,
    logging_options,
    require_peers,
    sampling_options,
    server_list_options,
    source_options,
)
from corolla.apps.cli.privacy import say_privacy_note
from corolla.apps.cli.progress import progress, progress_until_text
from corolla.errors import BadInput

if TYPE_CHECKING:
    from corolla.apps.cli.conversation import Conversation, Sampling, SwarmModel
    from corolla.models.source_options import SourceOptions

CONTEXT_TOKENS = 4096
"""Servers lease their cache for the whole length; the longest that most can give to many."""
STDERR = 2
STOPPING = b" (stopping when this step is over; Ctrl-C again ends)"
LEAVE = ("/exit", "/quit")
START_ANEW = "/new"


@click.command("chat")
@click.argument("model")
@join_option
@client_identity_option
@server_list_options
@sampling_options
@exact_option
@click.option(
    "--max-context", type=click.IntRange(min=2), metavar="N", help="Longest conversation, in tokens. Default: 4096."
)
@source_options
@logging_options("warning")
def command(
    model: str,
    join: tuple[str, ...],
    dtype: str,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    max_context: int | None,
    source: "SourceOptions",
) -> None:
    """Hold a conversation with a model served by a swarm.

    MODEL is the model's directory, a GGUF file or a hub's OWNER/NAME. Ctrl-C stops an answer, twice ends; /new begins
    anew; /exit or Ctrl-D ends.
    """
    peers = require_peers(join)
    with progress("joining the swarm and loading the local half of the model") as shown:
        from corolla.apps.cli.conversation import Sampling, open_model

        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        swarm_model = open_model(model, peers, dtype=None if dtype == "auto" else dtype, source=source, shown=shown)
    if not swarm_model.has_chat_template:
        raise BadInput(f"{model} has no chat template; use `corolla generate --raw`")
    say_privacy_note("/exit ends.")
    longest = max_context or min(CONTEXT_TOKENS, swarm_model.model.max_positions or CONTEXT_TOKENS)
    while converse(swarm_model, sampling, longest):
        click.echo("(a new conversation)", err=True)


def converse(swarm_model: "SwarmModel", sampling: "Sampling", max_context: int) -> bool:
    """One conversation; True when the user wants another."""
    from corolla.apps.cli.conversation import Conversation

    with swarm_model.model.inference_session(max_length=max_context) as session:
        return talk(Conversation(swarm_model, session, sampling))


def talk(conversation: "Conversation") -> bool:
    """Question and answer until the user ends it (False) or wants a new conversation (True)."""
    while (said := _read_line()) not in (None, *LEAVE):
        if said == START_ANEW:
            return True
        if said:
            _answer(conversation, said)
    return False


def _read_line() -> str | None:
    """What the user typed, None at the end of input."""
    try:
        typed = input("> " if sys.stdin.isatty() else "")
        return typed.encode(errors="replace").decode().strip()  # bytes that are no text would end the conversation
    except EOFError:
        return None


def _answer(conversation: "Conversation", question: str) -> None:
    try:
        with (
            stop_on_interrupt() as stop,
            progress_until_text("waiting for the first word", lambda part: click.echo(part, nl=False)) as write,
        ):
            conversation.ask(question, write, should_stop=stop.is_set)
    except BadInput as full:  # the session is as long as it may be; the user decides what to do
        click.echo(f"{full}; {START_ANEW} begins a new conversation", err=True)
    click.echo()


@contextmanager
def stop_on_interrupt() -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets, saying so, in place of KeyboardInterrupt; the second one raises that."""
    stop = threading.Event()

    def ask_to_stop(_signal: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        # Now, and not when the step is over: it may wait a minute for a server. Unbuffered, since the interrupted code
        # may be in the midst of writing.
        with contextlib.suppress(OSError):
            os.write(STDERR, STOPPING)

    before = signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
