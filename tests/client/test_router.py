"""A router answers at once from what it knows, reads the swarm beside requests, and minds faults and lists."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.lists import ServerLists
from corolla.client.router import SAME_FAULT_S, Router
from corolla.clock import loop_time
from corolla.errors import MissingBlocks
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.transport import MemoryTransport
from corolla.swarm.cost import CostModel
from corolla.wire.messages import HopTiming

PERIOD_S = 30.0


def router_story(tell: Callable[[MemorySwarm, MemoryTransport], Awaitable[None]]) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await tell(swarm, await swarm.join("client", is_client=True))

    run_virtual(told())


def router_of(swarm: MemorySwarm, client: MemoryTransport, lists: ServerLists | None = None) -> Router:
    return Router(client, swarm.model, CostModel(), refresh_period_s=PERIOD_S, rng=random.Random(0), lists=lists)


async def first_peer(router: Router) -> PeerId:
    return (await router.find_route(tokens_needed=16)).hops[0].peer


def test_a_fault_sends_the_next_route_elsewhere_and_a_success_brings_it_back() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        a, b = [(await swarm.serve(name, "0:8")).transport.peer for name in "ab"]
        router = router_of(swarm, client)
        router.saw_fault(a)
        assert {await first_peer(router) for _ in range(20)} == {b}
        router.saw_step(a, HopTiming(0.0, 0.008, 0.0), num_blocks=8, num_tokens=1)
        assert {await first_peer(router) for _ in range(20)} == {a, b}
        await router.close()

    router_story(story)


def test_one_loss_that_twenty_sessions_see_is_one_fault() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        a = (await swarm.serve("a", "0:8")).transport.peer
        router = router_of(swarm, client)
        for _ in range(20):
            router.saw_fault(a)
        assert router.book.faults(a, loop_time()) == 1
        await asyncio.sleep(SAME_FAULT_S)
        router.saw_fault(a)
        assert router.book.faults(a, loop_time()) == pytest.approx(2, abs=0.01)
        await router.close()

    router_story(story)


def test_a_ban_never_uncovers_a_block() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        only = (await swarm.serve("only", "0:8")).transport.peer
        router = router_of(swarm, client)
        router.saw_fault(only)
        assert await first_peer(router) == only
        await router.close()

    router_story(story)


def test_a_busy_servers_replies_steer_routes_to_the_idle_one() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        a, b = [(await swarm.serve(name, "0:8")).transport.peer for name in "ab"]
        router = router_of(swarm, client)
        router.saw_queue(a, 0.5)
        assert {await first_peer(router) for _ in range(20)} == {b}
        router.saw_queue(a, 0.0)
        router.saw_queue(b, 0.5)
        assert {await first_peer(router) for _ in range(20)} == {a}
        await router.close()

    router_story(story)


def test_the_users_lists_are_kept_even_where_that_uncovers_blocks() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        a, b = [(await swarm.serve(name, "0:8")).transport.peer for name in "ab"]
        for lists, peer in ((ServerLists(allowed=frozenset([a])), a), (ServerLists(blocked=frozenset([a])), b)):
            router = router_of(swarm, client, lists)
            assert {await first_peer(router) for _ in range(20)} == {peer}
            await router.close()
        router = router_of(swarm, client, ServerLists(blocked=frozenset([a, b])))
        with pytest.raises(MissingBlocks):
            await first_peer(router)
        await router.close()

    router_story(story)


def test_nothing_is_waited_for_but_the_first_reading() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        await swarm.serve("a", "0:8")
        router = router_of(swarm, client)
        await first_peer(router)
        for _ in range(5):
            await asyncio.sleep(PERIOD_S + 1)
            asked_at = loop_time()
            await first_peer(router)
            assert loop_time() == asked_at
        await router.close()

    router_story(story)


def test_round_trips_are_measured_beside_requests() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        peers = {(await swarm.serve(f"server {number}", "0:8")).transport.peer for number in range(4)}
        router = router_of(swarm, client)
        await first_peer(router)
        await asyncio.sleep(1)
        measured = router.usable_view()
        assert {peer for peer, server in measured.servers.items() if server.rtt_s is not None} == peers
        await router.close()

    router_story(story)


def test_an_idle_client_asks_nobody_anything() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        await swarm.serve("a", "0:8")
        router = router_of(swarm, client)
        await first_peer(router)
        await asyncio.sleep(5)
        before = client.traffic.messages
        await asyncio.sleep(600)
        assert client.traffic.messages == before
        await router.close()

    router_story(story)


def test_a_part_of_the_model_is_routed_without_given_servers_too() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        for name, span in (("a", "0:4"), ("b", "4:8"), ("c", "0:8")):
            await swarm.serve(name, span)
        router = router_of(swarm, client)
        best = await router.find_route(tokens_needed=16)
        assert len(best.hops) == 1
        part = router.find_part(range(4, 8), tokens_needed=16, without=frozenset([best.hops[0].peer]))
        assert [(hop.start, hop.end) for hop in part.hops] == [(4, 8)]
        await router.close()

    router_story(story)


def test_one_server_for_a_part_is_found_where_a_chain_of_several_costs_less() -> None:
    async def story(swarm: MemorySwarm, client: MemoryTransport) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("far", "0:8")):
            await swarm.serve(name, span)
        far = swarm.handlers["far"].transport.peer
        swarm.network.set_conditions(client.peer, far, LinkConditions(0.5))
        router = router_of(swarm, client)
        await router.refresh()
        await asyncio.sleep(3)
        assert len(router.find_part(range(4), tokens_needed=16).hops) == 2
        (hop,) = router.find_part(range(4), tokens_needed=16, alone=True).hops
        assert (hop.peer, hop.start, hop.end) == (far, 0, 4)
        with pytest.raises(MissingBlocks):
            router.find_part(range(4), tokens_needed=16, without=frozenset([far]), alone=True)
        await router.close()

    router_story(story)
