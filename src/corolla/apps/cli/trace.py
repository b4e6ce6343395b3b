"""`corolla trace`: where the time of a gateway's latest answers went."""

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

import click

from corolla.apps.cli.options import json_option, logging_options
from corolla.errors import BadInput, NoPeers, RemoteProtocolError

GATEWAY_VARIABLE = "COROLLA_GATEWAY"
KEY_VARIABLE = "COROLLA_API_KEY"
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 << 20
MAX_TRACES = 64


@click.command("trace")
@click.option(
    "--gateway",
    metavar="URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar=GATEWAY_VARIABLE,
    show_envvar=True,
    help="The gateway to ask, as its `ready` line says it.",
)
@click.option(
    "--api-key", metavar="KEY", envvar=KEY_VARIABLE, show_envvar=True, help="For a gateway that asks for one."
)
@click.option("--last", type=click.IntRange(1, MAX_TRACES), default=1, show_default=True, help="How many answers.")
@click.option("--steps", type=click.IntRange(min=0), default=20, show_default=True, help="Steps shown of each answer.")
@json_option
@logging_options("warning")
def command(gateway: str, api_key: str | None, last: int, steps: int, as_json: bool) -> None:
    """Show where the time of a gateway's latest answers went.

    For each answer: its route and the runner-up, what a token cost on average, and a waterfall of its steps: each
    hop's wire (half of the link's measured round trip), queue, compute and send, the gateway's own work, and the rest
    that nobody can place. With API keys, a caller sees its own answers only.
    """
    traces = read_traces(gateway, api_key, last)
    if as_json:
        click.echo(json.dumps({"traces": traces}, ensure_ascii=False, indent=2))
        return
    from corolla.apps.cli.trace_chart import print_traces

    print_traces(traces, max_steps=steps)


def read_traces(gateway: str, api_key: str | None, count: int) -> list[dict[str, Any]]:
    """The latest answers in full, the newest first. Raises BadInput, NoPeers or RemoteProtocolError."""
    if urlsplit(gateway).scheme not in ("http", "https"):
        raise BadInput(f"{gateway!r} is no address of a gateway, like http://127.0.0.1:8000")
    found = _get(gateway, f"/api/v1/traces?count={count}", api_key).get("traces")
    if not isinstance(found, list):
        raise _strange(gateway)
    ids = [trace["id"] for trace in found if isinstance(trace, dict) and isinstance(trace.get("id"), str)]
    return [_get(gateway, f"/api/v1/traces/{quote(trace_id, safe='')}", api_key) for trace_id in ids]


def _get(gateway: str, path: str, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(gateway.rstrip("/") + path, headers=headers)  # noqa: S310 - http, checked above
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            content = answer.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise BadInput(f"the gateway asks for a key: pass --api-key, or set {KEY_VARIABLE}") from error
        raise RemoteProtocolError(f"the gateway at {gateway} answered {error.code} to {path}") from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoPeers(f"no gateway answers at {gateway}: {reason}") from error
    try:
        said = json.loads(content) if len(content) <= MAX_ANSWER_BYTES else None
    except ValueError as error:
        raise _strange(gateway) from error
    if not isinstance(said, dict):
        raise _strange(gateway)
    return said


def _strange(gateway: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"what answers at {gateway} is no gateway of corolla, or of another version")
