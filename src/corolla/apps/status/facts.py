"""The state of a model as facts for programs: `corolla status --json` and the gateway's `/api/v1/state`."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from corolla.apps.status.reading import ModelStatus
from corolla.errors import as_ranges
from corolla.swarm.view import ServerView, View


def as_json(status: ModelStatus) -> dict[str, Any]:
    view = status.counted
    return {
        "name": status.entry.name,
        "fingerprint": status.entry.fingerprint,
        "num_blocks": status.entry.num_blocks,
        "health": view.health,
        "missing_blocks": missing_blocks(status),
        "fragile_blocks": view.fragile_blocks,
        "fragile": [{"peer": server.peer, "blocks": as_ranges(blocks)} for server, blocks in alone_on(view)],
        "coverage": [{"blocks": f"{start}:{end}", "servers": count} for start, end, count in runs(view.coverage)],
        "rejected": dict(status.rejected),
        "servers": [
            {**_server_as_json(server), "is_silent": server.peer in status.silent} for server in in_order(status.view)
        ],
    }


def missing_blocks(status: ModelStatus) -> list[int]:
    """Without any announcement, the view does not know how many blocks there are; the index does."""
    view = status.counted
    return view.missing_blocks if view.num_blocks else list(range(status.entry.num_blocks))


def in_order(view: View) -> list[ServerView]:
    """Its servers by the blocks that they host."""
    return sorted(view.servers.values(), key=lambda server: (server.start, server.end, server.peer))


def alone_on(view: View) -> list[tuple[ServerView, list[int]]]:
    """The servers that some blocks hang on, each with those blocks; in the order of the blocks."""
    fragile = view.fragile_blocks
    found = [
        (server, [block for block in fragile if server.start <= block < server.end])
        for server in in_order(view)
        if server.is_usable
    ]
    return [(server, blocks) for server, blocks in found if blocks]


def runs(coverage: Sequence[int]) -> list[tuple[int, int, int]]:
    """`[1, 1, 2]` as (start, end, servers): `(0, 2, 1), (2, 3, 2)`."""
    result: list[tuple[int, int, int]] = []
    start = 0
    for count, group in groupby(coverage):
        end = start + len(list(group))
        result.append((start, end, count))
        start = end
    return result


def _server_as_json(server: ServerView) -> dict[str, Any]:
    said = server.announcement
    return {
        "peer": server.peer,
        "name": said.name,
        "blocks": f"{server.start}:{server.end}",
        "state": said.state,
        "moving_to": f"{said.moving_to[0]}:{said.moving_to[1]}" if said.moving_to else None,
        "dtype": said.dtype,
        "quantization": said.quantization,
        "decode_tokens_per_s": said.decode_tokens_per_s,
        "prefill_tokens_per_s": said.prefill_tokens_per_s,
        "free_cache_tokens": said.free_cache_tokens,
        "queue_s": said.queue_s,
        "max_session_tokens": said.max_session_tokens,
        "adapters": said.adapters,
        "rtt_s": None if server.rtt_s is None or math.isinf(server.rtt_s) else server.rtt_s,
        "version": said.version,
        "commit": said.commit or None,
    }
