"""A client whose own network has ended says so at once, and holds it against no server."""

import asyncio
import os
import random
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.session import Session
from corolla.client.swarm import Swarm, join_swarm
from corolla.clock import loop_time
from corolla.errors import NetworkLost
from corolla.ids import Fingerprint, PeerId
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.transport import MemoryTransport
from corolla.server.config import ServerConfig
from corolla.server.executor import InlineExecutor
from corolla.server.serving import ServedSpan, serve_span

SPANS = (range(4), range(4, 8))
MODEL = ServedModel("toy", Fingerprint("8" * 32), 8)
LONGEST_S = 30.0
"""On a busy machine; half of what is waited for a server."""


async def feed(session: Session, number: int) -> list[int]:
    output = await session.step(hidden_of([[number]]), num_tokens=1, want="all")
    assert output is not None
    return numbers_of(output)


def banned(client: Swarm, model: ServedModel) -> dict[PeerId, float]:
    return client.router(model).book.banned(loop_time())


@pytest.mark.parametrize("is_in_a_step", [False, True])
def test_the_loss_of_ones_own_network_is_said_at_once_and_held_against_nobody(is_in_a_step: bool) -> None:
    async def story() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            for name, span in (("a", "0:4"), ("b", "4:8"), ("b2", "4:8")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            session = await client.start_session(swarm.model, max_tokens=8)
            await feed(session, 1)
            own, began = client.transport, loop_time()
            assert isinstance(own, MemoryTransport)
            running = asyncio.create_task(feed(session, 2)) if is_in_a_step else None
            await asyncio.sleep(0)
            own.end("the daemon died")
            await asyncio.sleep(0.1)
            with pytest.raises(NetworkLost, match=r"the daemon died.*no server is to blame.*oin the swarm again"):
                await (running or feed(session, 2))
            with pytest.raises(NetworkLost):
                await feed(session, 3)
            with pytest.raises(NetworkLost):
                await client.start_session(swarm.model, max_tokens=8)
            assert loop_time() - began < 1
            assert banned(client, swarm.model) == {}
            session.close()

    run_virtual(story())


@pytest.mark.slow
def test_a_client_whose_daemon_is_killed_raises_in_place_of_waiting_for_servers() -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            servers = [await serve(stack, blocks) for blocks in SPANS]
            transport = await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))
            client = await stack.enter_async_context(join_swarm(transport, servers[0].addresses, ClientConfig()))
            session = await client.start_session(MODEL, max_tokens=8)
            assert await feed(session, 1) == whole_model(8, [1])
            os.kill(transport.daemon_pid, signal.SIGKILL)
            killed_at = time.monotonic()
            for _ in range(2):
                with pytest.raises(NetworkLost, match="daemon ended"):
                    await feed(session, 2)
            assert time.monotonic() - killed_at < LONGEST_S
            assert banned(client, MODEL) == {}
            session.close()

    asyncio.run(story())


async def serve(stack: AsyncExitStack, blocks: range) -> Libp2pTransport:
    transport = await stack.enter_async_context(open_transport(NetworkConfig()))
    if blocks.start:
        await transport.join(FIRST, timeout_s=LONGEST_S)
    else:
        FIRST[:] = transport.addresses
    config = ServerConfig(model=Path("toy"), name="toy", cache_tokens=64)
    served = ServedSpan(MODEL.name, MODEL.fingerprint, MODEL.num_blocks, 1000.0, 1000.0)
    await stack.enter_async_context(
        serve_span(
            transport, ToySpan(blocks.start, blocks.stop), InlineExecutor(), config, served, rng=random.Random(0)
        )
    )
    return transport


FIRST: list[str] = []
