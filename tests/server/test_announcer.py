"""A server is known while it serves, what it says is true, and it never says it too often."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.ids import Fingerprint, PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.server.announcer import LEAST_GAP_S, MAX_INDEXERS, Announcer, is_indexer, is_news
from corolla.swarm.announcement import MAX_INFLOWS, MODELS_KEY, UNREACHABLE_RTT_S, Announcement
from corolla.swarm.capacity import Inflows
from corolla.swarm.view import ServerView, View
from corolla.swarm.watch import Watcher, list_models

MODEL = Fingerprint("0123456789abcdef" * 2)
SAID = Announcement(
    state="online", start=0, end=4, num_blocks=4, fingerprint=MODEL, model_name="model", dtype="float32",
    free_cache_tokens=1000, decode_tokens_per_s=100.0,
)  # fmt: skip


def saying(**fields: Any) -> Announcement:
    return msgspec.structs.replace(SAID, **fields)


class Changing:
    """A server whose announcement a test changes."""

    def __init__(self) -> None:
        self.now = SAID

    def describe(self) -> Announcement:
        return self.now


def announcer_of(server: MemoryTransport, described: Changing) -> Announcer:
    return Announcer(server, described.describe, period_s=45, lifetime_s=180, rng=random.Random(0))


def test_an_announcement_is_renewed_while_the_server_lives_and_gone_at_once_when_it_leaves() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("server") as server:
            await server.join(boot.addresses, timeout_s=5)
            announcer, watcher = announcer_of(server, Changing()), Watcher(boot, MODEL)
            keeper = asyncio.create_task(announcer.keep_announced())
            await asyncio.sleep(600)
            assert list((await watcher.refresh()).servers) == [server.peer]
            assert [entry.name for entry in list_models(await boot.records.get(MODELS_KEY))] == ["model"]
            keeper.cancel()
            await announcer.withdraw()
            assert not (await watcher.refresh()).servers

    run_virtual(scenario())


def test_what_moved_a_lot_is_announced_soon_and_a_change_of_state_at_once() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("server") as server:
            await server.join(boot.addresses, timeout_s=5)
            described, watcher = Changing(), Watcher(boot, MODEL)
            announcer = announcer_of(server, described)
            keeper = asyncio.create_task(announcer.keep_announced())
            await asyncio.sleep(1)
            described.now = saying(free_cache_tokens=100)
            await asyncio.sleep(LEAST_GAP_S + 1)
            seen = (await watcher.refresh()).servers[server.peer].announcement
            assert seen.free_cache_tokens == 100
            described.now = saying(free_cache_tokens=100, state="draining")
            await asyncio.sleep(1.5)
            assert (await watcher.refresh()).servers[server.peer].announcement.state == "draining"
            described.now = saying()
            await asyncio.sleep(1.5)
            assert (await watcher.refresh()).servers[server.peer].announcement == SAID
            keeper.cancel()

    run_virtual(scenario())


def test_a_restless_server_announces_itself_six_times_a_minute_at_most() -> None:
    async def scenario() -> float:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("server") as server:
            await server.join(boot.addresses, timeout_s=5)
            described = Changing()
            keeper = asyncio.create_task(announcer_of(server, described).keep_announced())
            for second in range(600):
                described.now = saying(free_cache_tokens=1000 * (second % 2))
                await asyncio.sleep(1)
            keeper.cancel()
            return server.traffic.messages / 4 / 10  # of each put: who is nearest, and the store

    puts_a_minute = run_virtual(scenario())
    assert 5 < puts_a_minute <= 6 + 2 * 60 / 40


@pytest.mark.parametrize(
    "change",
    [
        {"state": "draining"}, {"end": 3}, {"adapters": ["poet"]}, {"free_cache_tokens": 740}, {"queue_s": 0.06},
        {"decode_tokens_per_s": 70.0}, {"prefill_tokens_per_s": 1.0}, {"next_rtts": {"other": 0.1}},
    ],
)  # fmt: skip
def test_news_is_what_others_would_choose_badly_by(change: dict[str, Any]) -> None:
    assert is_news(SAID, saying(**change))


@pytest.mark.parametrize(
    "change",
    [{"free_cache_tokens": 800}, {"queue_s": 0.04}, {"decode_tokens_per_s": 80.0}, {"announced_at": 5.0}, {}],
)
def test_small_changes_wait_for_the_period(change: dict[str, Any]) -> None:
    assert not is_news(SAID, saying(**change))


def rtts(first_s: float) -> Announcement:
    return saying(next_rtts={"first": first_s, "second": 0.02})


def test_a_neighbour_that_vanishes_or_comes_back_is_news_and_one_that_is_somewhat_slower_is_not() -> None:
    assert is_news(rtts(0.02), rtts(UNREACHABLE_RTT_S))
    assert is_news(rtts(UNREACHABLE_RTT_S), rtts(0.02))
    assert not is_news(rtts(0.02), rtts(0.03))
    assert not is_news(rtts(UNREACHABLE_RTT_S), rtts(UNREACHABLE_RTT_S))


def test_a_link_that_is_measured_first_or_changes_twofold_is_news() -> None:
    assert is_news(SAID, saying(inflows={"before": 100}))
    assert is_news(saying(inflows={"before": 100}), saying(inflows={"before": 50}))
    assert is_news(saying(inflows={"before": 100}), saying(inflows={"before": 200}))
    assert not is_news(saying(inflows={"before": 100}), saying(inflows={"before": 60}))
    assert not is_news(saying(inflows={"before": 100}), SAID)  # nothing large came for long
    full = {f"peer{number}": 100 for number in range(MAX_INFLOWS)}
    others = {f"peer{number}": 100 for number in range(1, MAX_INFLOWS + 1)}
    assert not is_news(saying(inflows=full), saying(inflows=others))


def test_links_that_are_measured_again_and_again_make_an_hour_no_livelier() -> None:
    rng, inflows, num_news = random.Random(0), Inflows(), 0
    peers = [PeerId(f"12 servers, {number:10}") for number in range(12)]
    said = saying(inflows={})
    for now in range(0, 3600, 10):  # a large message from each between any two announcements
        for peer in peers:
            inflows.saw(peer, 1e7 * rng.uniform(0.3, 1.7), now)
        saying_now = saying(inflows=inflows.to_announce(peers, now))
        if is_news(said, saying_now):
            said, num_news = saying_now, num_news + 1
    assert num_news <= 12


def test_a_large_model_does_not_crowd_others_out_of_the_index() -> None:
    peers = [PeerId(f"peer{number}") for number in range(1000)]
    view = View.of(ServerView(peer, SAID, expires_at=0.0) for peer in peers)
    assert sum(is_indexer(view, peer) for peer in peers) == MAX_INDEXERS
    assert is_indexer(View(0), PeerId("first of all"))


def test_a_server_that_is_ended_while_it_announces_itself_for_the_first_time_is_not_left_behind() -> None:
    async def scenario() -> None:
        conditions = LinkConditions(latency_s=1.0)  # long enough to be ended between two of its messages
        async with MemorySwarm(num_blocks=4, conditions=conditions) as swarm:
            watcher = Watcher(await swarm.join("onlooker", is_client=True), swarm.model.fingerprint)
            starting = asyncio.create_task(swarm.serve("server", "0:4"))
            async with asyncio.timeout(60):
                while not (await watcher.refresh()).servers:
                    pass
            assert not starting.done()
            starting.cancel()
            await asyncio.wait([starting])
            await watcher.refresh()
            assert not watcher.view.servers

    run_virtual(scenario())
