"""What nobody uses any more is let go: a client's control streams, and a server's stream from a former upstream."""

import asyncio

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.hop import IDLE_LINK_S
from corolla.client.session import Session
from corolla.net.memory.loop import run_virtual

NUM_BLOCKS = 4


async def write(session: Session, number: int, history: list[int]) -> None:
    history.append(number)
    output = await session.step(hidden_of([[number]]), num_tokens=1, want="last")
    assert output is not None
    assert numbers_of(output) == whole_model(NUM_BLOCKS, history)[-1:]


def test_a_control_stream_that_no_session_needs_ends_after_a_while_and_the_next_session_dials_again() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS) as swarm:
            handlers = [await swarm.serve("a", "0:2"), await swarm.serve("b", "2:4")]
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=8) as session:
                await asyncio.sleep(2 * IDLE_LINK_S)
                await write(session, 1, [])
            await asyncio.sleep(0.9 * IDLE_LINK_S)
            assert [handler.num_control_streams for handler in handlers] == [1, 1]
            async with client.open_session(swarm.model, max_tokens=8) as session:
                await asyncio.sleep(0.9 * IDLE_LINK_S)
                await write(session, 1, [])
            await asyncio.sleep(1.1 * IDLE_LINK_S)
            assert [handler.num_control_streams for handler in handlers] == [0, 0]
            async with client.open_session(swarm.model, max_tokens=8) as session:
                await write(session, 1, [])

    run_virtual(told())


def test_a_former_upstream_keeps_no_stream_into_the_session() -> None:
    """It is frozen, and so does not end the stream by itself; up to 64 MB of it could lie unread."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS) as swarm:
            await swarm.serve("a", "0:2")
            tail = await swarm.serve("b", "2:4")
            client, history = await swarm.client("client"), list[int]()
            async with client.open_session(swarm.model, max_tokens=8) as session:
                await write(session, 1, history)
                another = await swarm.serve("another", "0:2")
                swarm.network.freeze(swarm.handlers["a"].transport.peer)
                await write(session, 2, history)
                await asyncio.sleep(1)
                (hosted,) = tail.sessions.values()
                assert set(hosted.links) == {client.own_peer, another.transport.peer}

    run_virtual(told())
