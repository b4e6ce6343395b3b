"""A server whose upkeep has failed is found by nobody: it says why, serves those it has, and ends."""

import asyncio

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan
from corolla.errors import SwarmError
from corolla.net.memory.loop import run_virtual
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.executor import InlineExecutor
from corolla.server.server import until_stopped
from corolla.server.serving import ServedSpan, serve_span


def test_a_server_that_cannot_keep_itself_announced_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_down(_self: Announcer) -> None:
        await asyncio.sleep(100)
        raise ValueError("a bug")

    monkeypatch.setattr(Announcer, "keep_announced", break_down)

    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            transport = await swarm.join("server")
            broken: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()
            served = ServedSpan(swarm.model.name, swarm.model.fingerprint, 2, 1000.0, 1000.0)
            config = ServerConfig(model="toy")
            async with serve_span(
                transport, ToySpan(0, 2), InlineExecutor(), config, served, on_broken=broken.set_result
            ):
                with pytest.raises(SwarmError, match="keep_announced has failed"):
                    await until_stopped(asyncio.Event(), transport, broken)

    run_virtual(told())
