"""What the user says about servers holds in every route, and what heartbeats say reaches the next one."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.config import ClientConfig
from corolla.client.lists import ServerLists, read_lists
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import BadInput, MissingBlocks
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.executor import InlineExecutor

ANNOUNCED_S = 120.0
THIN_BYTES_PER_S = 500.0
"""A toy's position takes 4 bytes: 8 ms for one, 70 ms for each of 256 steps after a prompt of 2,000."""


def story_of_two(tell: Callable[[MemorySwarm, PeerId, PeerId], Awaitable[None]]) -> None:
    """Two servers, alike, of the whole model."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            a, b = [(await swarm.serve(name, "0:8")).transport.peer for name in "ab"]
            await tell(swarm, a, b)

    run_virtual(told())


async def servers_of(client: Swarm, swarm: MemorySwarm, count: int) -> Counter[PeerId]:
    """Where so many sessions, one after the other, are served."""
    taken = Counter[PeerId]()
    for _ in range(count):
        async with client.open_session(swarm.model, max_tokens=8) as session:
            taken[session.route[0].peer_id] += 1
    return taken


def test_a_blocked_server_is_never_used_and_only_allowed_ones_are() -> None:
    async def story(swarm: MemorySwarm, a: PeerId, b: PeerId) -> None:
        without_a = await swarm.client("x", ClientConfig(servers=ServerLists(blocked=frozenset({a}))))
        assert set(await servers_of(without_a, swarm, 5)) == {b}
        only_a = await swarm.client("y", ClientConfig(servers=ServerLists(allowed=frozenset({a}))))
        assert set(await servers_of(only_a, swarm, 5)) == {a}

    story_of_two(story)


def test_the_lists_hold_even_where_they_leave_nobody() -> None:
    async def story(swarm: MemorySwarm, a: PeerId, b: PeerId) -> None:
        client = await swarm.client("x", ClientConfig(servers=ServerLists(blocked=frozenset({a, b}))))
        with pytest.raises(MissingBlocks):
            await servers_of(client, swarm, 1)

    story_of_two(story)


def test_who_wants_no_quantization_is_never_served_with_it_and_told_when_there_is_nothing_else() -> None:
    async def story(swarm: MemorySwarm, a: PeerId, b: PeerId) -> None:
        near = (await swarm.serve("near", "0:8", quantization="nf4")).transport.peer
        exact = ClientConfig(servers=read_lists(None, None, "none"))
        assert set(await servers_of(await swarm.client("x", exact), swarm, 12)) <= {a, b}
        assert near in await servers_of(await swarm.client("y"), swarm, 30)
        await swarm.leave("a")
        await swarm.leave("b")
        with pytest.raises(MissingBlocks, match="; only quantized, which was not wanted"):
            await servers_of(await swarm.client("z", exact), swarm, 1)

    story_of_two(story)


def test_a_session_with_a_long_prompt_goes_past_a_thin_link_and_others_go_over_it() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            head, thin, wide = [
                await swarm.serve(name, span) for name, span in (("head", "0:4"), ("thin", "4:8"), ("wide", "4:8"))
            ]
            thin.inflows.saw(head.transport.peer, THIN_BYTES_PER_S, loop_time())
            await asyncio.sleep(ANNOUNCED_S)
            clients = [await swarm.client(name) for name in ("short", "long")]
            for client in clients:
                swarm.network.set_conditions(client.own_peer, wide.transport.peer, LinkConditions(0.05))
                await client.router(swarm.model).refresh()
            await asyncio.sleep(1)  # the pings come back
            taken: list[PeerId] = []
            for client, prompt_tokens in zip(clients, (1, 2000), strict=True):
                async with client.open_session(swarm.model, max_tokens=3000, prompt_tokens=prompt_tokens) as session:
                    taken.append(session.route[1].peer_id)
            assert taken == [thin.transport.peer, wide.transport.peer]

    run_virtual(told())


def test_only_any_quantization_or_none_can_be_asked_for() -> None:
    with pytest.raises(BadInput, match="'int4': a client takes any, or only servers with none"):
        read_lists(None, None, "int4")


def test_what_is_no_peer_id_is_refused_in_words() -> None:
    with pytest.raises(BadInput, match=r"'10\.0\.0\.1' is no peer id"):
        read_lists(None, ["10.0.0.1"])
    assert read_lists(None, None) == ServerLists()


def test_the_next_session_keeps_the_route_and_batch_work_spreads() -> None:
    async def story(swarm: MemorySwarm, a: PeerId, b: PeerId) -> None:
        waiting = await servers_of(await swarm.client("x"), swarm, 20)
        assert len(waiting) == 1
        batch = await servers_of(await swarm.client("y", ClientConfig(mode="max_throughput")), swarm, 40)
        assert min(batch[a], batch[b]) >= 10

    story_of_two(story)


def test_a_long_line_that_a_heartbeat_tells_of_sends_the_next_session_elsewhere() -> None:
    async def story(swarm: MemorySwarm, a: PeerId, b: PeerId) -> None:
        client = await swarm.client("x")
        [first] = await servers_of(client, swarm, 1)
        busy = next(handler for handler in swarm.handlers.values() if handler.transport.peer == first)
        assert isinstance(busy.executor, InlineExecutor)
        busy.executor.queue_s = 3.0
        await asyncio.sleep(8)  # heartbeats pass while nobody computes; the announcement comes later
        router = client.router(swarm.model)
        assert router.usable_view().servers[first].queue_s == pytest.approx(3.0, rel=0.2)
        assert router.view.servers[first].announcement.queue_s == 0.0
        [second] = {a, b} - {first}
        assert second in await servers_of(client, swarm, 12)  # each leaves by chance, so that not all go at once

    story_of_two(story)


def test_a_mode_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="min_latency, max_throughput"):
        ClientConfig(mode="fastest")  # pyright: ignore[reportArgumentType]
