"""Many streaming requests at a gateway at once, over servers that are processes: what comes back, and what stays held.

For `benchmarks/gateway_load.py` and for the test that 64 of them end well. A reader is a thread with a connection of
its own, as a stranger's program would be.
"""

import http.client
import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from corolla.apps.processes import Child, Processes
from corolla.errors import SwarmError

READ_TIMEOUT_S: Final = 300.0
HELD: Final = {
    "gateway": ("active_answers", "waiting_requests", "kept_sessions"),
    "server": ("sessions", "cache_used_tokens", "in_flight_bytes"),
}
"""Metrics that are 0 when nobody is asking anything."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as its reader got it; seconds since the request was sent."""

    text: str
    num_pieces: int
    """Chunks with text: tokens, but for those that only complete a character with others."""
    finish: str | None
    """None: the reader hung up."""
    first_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Door:
    """A swarm and its gateway, as processes."""

    url: str
    gateway: Child
    servers: Sequence[Child]
    server_pages: Sequence[str]
    """Of the servers' metrics."""

    def held(self) -> dict[str, float]:
        """Everything that somebody holds now, by process and metric; empty when nothing is."""
        pages = {"gateway": f"{self.url}/metrics"}
        pages |= {f"server {number}": page for number, page in enumerate(self.server_pages)}
        return {
            f"{process} {name}": value
            for process, page in pages.items()
            for name, value in _read_metrics(page, process.split()[0]).items()
            if value
        }

    def num_descriptors(self) -> list[int]:
        """Open files, sockets and pipes of the gateway and each server (Linux)."""
        return [len(os.listdir(f"/proc/{child.process.pid}/fd")) for child in (self.gateway, *self.servers)]

    def memory_bytes(self) -> list[int]:
        """Resident, of the same (Linux)."""
        statements = [Path(f"/proc/{child.process.pid}/statm") for child in (self.gateway, *self.servers)]
        return [int(statement.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for statement in statements]


def start_servers(
    processes: Processes, model: Path, spans: Sequence[tuple[int, int]], *options: str, deadline: float
) -> tuple[str, list[Child], list[str]]:
    """A bootstrap peer and a server for each span, with metrics: (address, servers, their pages)."""
    address = processes.start("the bootstrap peer", "bootstrap").wait_ready(deadline).addr
    servers, pages = list[Child](), list[str]()
    for start, end in spans:
        page = f"127.0.0.1:{_free_port()}"
        words = ("--blocks", f"{start}:{end}", "--metrics", page, "--join", address, *options)
        servers.append(processes.start(f"server {start}:{end}", "serve", str(model), *words))
        pages.append(f"http://{page}/metrics")
    for server in servers:
        server.wait_ready(deadline)
    return address, servers, pages


def start_gateway(processes: Processes, model: Path, address: str, *options: str) -> tuple[str, Child]:
    """(URL, process), once it answers; for whoever can wait for its loading."""
    words = ("--join", address, "--listen", "127.0.0.1:0", *options)
    gateway = processes.start("the gateway", "gateway", str(model), *words)
    assert gateway.process.stdout is not None
    line = gateway.process.stdout.readline()
    if not line:
        raise SwarmError(
            f"the gateway ended before it was ready; {gateway.log_path.read_text(errors='replace')[-500:]}"
        )
    return str(json.loads(line)["url"]), gateway


def read_all(url: str, bodies: Sequence[dict[str, Any]], quitters: Sequence[dict[str, Any]] = ()) -> list[Streamed]:
    """Every answer to `bodies`, all asked for at once. `quitters` are asked for too, by who hangs up at the first word.

    Raises SwarmError for an answer that is an error, or is broken off.
    """
    with ThreadPoolExecutor(max_workers=len(bodies) + len(quitters)) as readers:
        leaving = [readers.submit(read_stream, url, body, hang_up=True) for body in quitters]
        staying = [readers.submit(read_stream, url, body) for body in bodies]
        for one in leaving:
            one.result()
        return [one.result() for one in staying]


def read_stream(url: str, body: dict[str, Any], *, hang_up: bool = False) -> Streamed:
    """One streamed chat. Raises SwarmError."""
    asked = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(  # noqa: S310 - our own gateway
        f"{url}/v1/chat/completions", asked, {"Content-Type": "application/json"}
    )
    began, first_s, pieces, finish = time.monotonic(), 0.0, list[str](), None
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as answer:  # noqa: S310
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if not data:
                    continue
                if data == b"[DONE]":
                    return Streamed("".join(pieces), len(pieces), finish, first_s, time.monotonic() - began)
                text, ended = _piece(json.loads(data))
                finish = ended or finish
                if text:
                    first_s = first_s or time.monotonic() - began
                    pieces.append(text)
                    if hang_up:
                        return Streamed(text, 1, None, first_s, first_s)
    except (OSError, http.client.HTTPException) as fault:
        raise SwarmError(f"a stream failed: {fault}") from fault
    raise SwarmError("a stream ended without [DONE]")


def _piece(chunk: dict[str, Any]) -> tuple[str, str | None]:
    if "error" in chunk:
        raise SwarmError(f"a stream ended with an error: {chunk['error']['message']}")
    if not chunk["choices"]:
        return "", None
    [choice] = chunk["choices"]
    return choice["delta"].get("content") or "", choice["finish_reason"]


def _read_metrics(page: str, kind: str) -> dict[str, float]:
    with urllib.request.urlopen(page, timeout=30) as answer:  # noqa: S310 - our own process
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name in HELD[kind]:
        line = re.search(rf"^corolla_{kind}_{name} (\S+)$", text, re.MULTILINE)
        if line is None:
            raise SwarmError(f"{page} does not say {name}")
        found[name] = float(line[1])
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
