"""The one line on standard output by which a serving process says that it answers requests."""

import json
from collections.abc import Sequence

import click

from corolla.ids import PeerId


def ready_line(peer: PeerId, blocks: tuple[int, int] | None, addresses: Sequence[str], *, as_json: bool) -> str:
    """`ready peer=ID [blocks=A:B] addr=MULTIADDR`; as JSON, an object with these three, blocks null without a model."""
    span = f"{blocks[0]}:{blocks[1]}" if blocks else None
    if as_json:
        return json.dumps({"peer": peer, "blocks": span, "addr": addresses[0]})
    return f"ready peer={peer}{f' blocks={span}' if span else ''} addr={addresses[0]}"


def say_ready(peer: PeerId, blocks: tuple[int, int] | None, addresses: Sequence[str], *, as_json: bool) -> None:
    """Print the line, flushed: a parent that reads it through a pipe waits for it."""
    click.echo(ready_line(peer, blocks, addresses, as_json=as_json))
