"""A server that joins says so: the addresses it was given may take half a minute to answer, or never do."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.errors import NoPeers
from corolla.net.libp2p.config import NetworkConfig
from corolla.server import server
from corolla.server.config import ServerConfig


class Deaf:
    """A transport that nobody answers."""

    async def __aenter__(self) -> "Deaf":
        return self

    async def __aexit__(self, *_error: object) -> None: ...

    async def join(self, peers: object, *, timeout_s: float) -> None:
        raise NoPeers(f"nobody answered at {peers} within {timeout_s:g} s")


def test_joining_is_told_before_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "open_transport", lambda _network: Deaf())
    monkeypatch.setattr(server, "fingerprint", lambda _checkpoint: "f" * 32)
    monkeypatch.setattr(server, "_begin", lambda *_: None)
    checkpoint: Any = SimpleNamespace(name="m", num_blocks=4, max_positions=None)

    async def join() -> None:
        await server._run(
            ServerConfig(model="m"), NetworkConfig(), ["/a", "/b"], checkpoint, asyncio.Event(), lambda _: None, None,
            None,
        )  # fmt: skip

    with caplog.at_level(logging.INFO, logger="corolla.server.server"), pytest.raises(NoPeers):
        asyncio.run(join())
    [told] = [record for record in caplog.records if record.message == "joining the swarm"]
    assert vars(told)["addresses"] == 2
