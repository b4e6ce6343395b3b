"""Measured links are smoothed and forgotten with time; the slowest of servers are announced, never those of clients."""

import asyncio

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.swarm.announcement import MAX_BYTES_PER_S, MAX_INFLOWS, short_peer
from corolla.swarm.capacity import CAPACITY_LIFE_S, MAX_PEERS, Inflows, after_sample
from corolla.swarm.watch import Watcher

A, B = PeerId("peer A"), PeerId("peer B")


def test_one_odd_sample_moves_the_mean_a_little_and_an_old_one_gives_way() -> None:
    old = after_sample(None, 1e6, 0.0)
    assert after_sample(old, 11e6, 1.0).bytes_per_s == pytest.approx(3e6)
    assert after_sample(old, 11e6, CAPACITY_LIFE_S).bytes_per_s == pytest.approx(11e6)


def test_what_was_seen_long_ago_is_not_announced() -> None:
    inflows = Inflows()
    inflows.saw(A, 1e6, 0.0)
    assert inflows.to_announce([A], CAPACITY_LIFE_S - 1) == {short_peer(A): 1_000_000}
    assert inflows.to_announce([A], CAPACITY_LIFE_S) == {}


def test_the_slowest_links_of_servers_are_announced_in_bounds() -> None:
    inflows, servers = Inflows(), [PeerId(f"server {number:03}") for number in range(20)]
    for number, peer in enumerate(servers):
        inflows.saw(peer, (20 - number) * 1e6, 0.0)
    inflows.saw(PeerId("a client"), 1.0, 0.0)
    said = inflows.to_announce(servers, 1.0)
    assert list(said) == [short_peer(peer) for peer in reversed(servers[-MAX_INFLOWS:])]
    inflows.saw(A, 1e300, 0.0)
    inflows.saw(B, 1e-9, 0.0)
    assert inflows.to_announce([A, B], 1.0) == {short_peer(B): 1, short_peer(A): MAX_BYTES_PER_S}


def test_strangers_do_not_grow_the_table() -> None:
    inflows = Inflows()
    for number in range(2 * MAX_PEERS):
        inflows.saw(PeerId(f"client {number}"), 1e6, float(number))
    assert len(inflows.to_announce([PeerId(f"client {number}") for number in range(MAX_PEERS)], 1.0)) == 0


def test_a_prompts_way_tells_a_server_how_thin_its_link_is_and_clients_learn_it() -> None:
    async def scenario() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            limits = SessionLimits(max_chunk_tokens=100_000, max_session_tokens=100_000)
            first = await swarm.serve("first", "0:1", limits=limits, cache_tokens=100_000)
            last = await swarm.serve("last", "1:2", limits=limits, cache_tokens=100_000)
            thin = LinkConditions(latency_s=0.02, bytes_per_s=500_000)
            swarm.network.set_conditions(first.transport.peer, last.transport.peer, thin, one_way=True)
            client = await swarm.client("client")
            num_tokens = 60_000  # of eight bytes each
            async with client.open_session(swarm.model, max_tokens=num_tokens) as session:
                await session.step(hidden_of([range(num_tokens)]), num_tokens=num_tokens, want="last")
            await asyncio.sleep(60)  # announcements are renewed
            view = await Watcher(client.transport, swarm.model.fingerprint).refresh()
            said = view.servers[last.transport.peer].announcement
            assert said.inflows == {short_peer(first.transport.peer): pytest.approx(500_000, rel=0.05)}
            assert view.servers[first.transport.peer].announcement.inflows == {}  # only the client sent it anything

    run_virtual(scenario())
