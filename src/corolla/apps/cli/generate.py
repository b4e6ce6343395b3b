"""`corolla generate`: one prompt, one answer."""

import sys
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
    from corolla.models.source_options import SourceOptions


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@join_option
@client_identity_option
@server_list_options
@sampling_options
@exact_option
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@source_options
@logging_options("warning")
def command(
    model: str,
    prompt: str,
    join: tuple[str, ...],
    dtype: str,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    raw: bool,
    source: "SourceOptions",
) -> None:
    """Continue a prompt, or answer it, with a model served by a swarm.

    MODEL is the model's directory, a GGUF file or a hub's OWNER/NAME: embeddings and head are taken from it, the
    blocks run on servers. A PROMPT of - is read from standard input. The text comes on standard output.
    """
    peers = require_peers(join)
    with progress("joining the swarm and loading the local half of the model") as shown:
        from corolla.apps.cli.conversation import Conversation, Sampling, open_model

        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        swarm_model = open_model(model, peers, dtype=None if dtype == "auto" else dtype, source=source, shown=shown)
    text = _checked(sys.stdin.read() if prompt == "-" else prompt)
    say_privacy_note()
    is_chat = swarm_model.has_chat_template and not raw
    tokens = swarm_model.encode_chat([{"role": "user", "content": text}]) if is_chat else swarm_model.encode(text)
    with (
        swarm_model.model.inference_session(max_length=len(tokens) + max_new_tokens) as session,
        progress_until_text(f"the servers read {len(tokens)} tokens", lambda part: click.echo(part, nl=False)) as write,
    ):
        Conversation(swarm_model, session, sampling).complete(tokens, write)
    click.echo()


def _checked(text: str) -> str:
    """Raises BadInput for bytes that are no text: Python hands them on as halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        raise BadInput(f"the prompt is not text in UTF-8: see its character {wrong.start + 1}") from None
    return text
