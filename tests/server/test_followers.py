"""A server knows how far the next ones are, and announces the nearest."""

import asyncio
import random

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.ids import Fingerprint, PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.followers import Followers, pick_followers
from corolla.swarm.announcement import MAX_NEXT_RTTS, UNREACHABLE_RTT_S, Announcement, short_peer
from corolla.swarm.rtt import Rtt
from corolla.swarm.view import ServerView, View
from corolla.swarm.watch import Watcher

SPAN = range(2, 4)


class CountingWatcher(Watcher):
    num_readings = 0

    async def refresh(self) -> View:
        self.num_readings += 1
        return await super().refresh()


def server(name: str, start: int, end: int) -> ServerView:
    said = Announcement(
        state="online", start=start, end=end, num_blocks=8, fingerprint=Fingerprint("0" * 32), model_name="model",
        dtype="float32",
    )  # fmt: skip
    return ServerView(PeerId(name), said, expires_at=0.0)


def test_only_servers_that_go_on_where_ours_ends_are_measured() -> None:
    view = View.of([server("me", 2, 4), server("next", 4, 8), server("over", 3, 5), server("before", 0, 4)])
    assert set(pick_followers(view, PeerId("me"), SPAN, {}, random.Random(0))) == {"next", "over"}


def test_the_nearest_are_kept_true_while_all_get_their_turn() -> None:
    view = View.of(server(f"peer{number}", 4, 8) for number in range(40))
    rtts = {PeerId(f"peer{number}"): Rtt(number / 100, at=0.0) for number in range(20)}
    picked = pick_followers(view, PeerId("me"), SPAN, rtts, random.Random(0))
    assert picked[:6] == [f"peer{number}" for number in range(6)]
    assert len(picked) == 12
    assert not set(picked[6:]) & set(rtts)


def test_measured_delays_are_announced_the_nearest_eight_of_them() -> None:
    async def scenario() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            first = (await swarm.serve("first", "0:4")).transport.peer
            last = [(await swarm.serve(f"last {number}", "4:8")).transport.peer for number in range(10)]
            for number, peer in enumerate(last):
                swarm.network.set_conditions(first, peer, LinkConditions(latency_s=0.01 * (number + 1)))
            await asyncio.sleep(600)
            client = await swarm.join("client", is_client=True)
            said = (await Watcher(client, swarm.model.fingerprint).refresh()).servers[first].announcement
            nearest = last[:MAX_NEXT_RTTS]
            assert said.next_rtts == pytest.approx(
                {short_peer(peer): 0.02 * (number + 1) for number, peer in enumerate(nearest)}, rel=0.3
            )
            assert not any(
                server.announcement.next_rtts
                for peer, server in (await Watcher(client, swarm.model.fingerprint).refresh()).servers.items()
                if peer in last
            )

    run_virtual(scenario())


def test_a_server_that_cannot_be_reached_from_here_is_announced_as_far_away() -> None:
    async def scenario() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            first = (await swarm.serve("first", "0:4")).transport.peer
            last = (await swarm.serve("last", "4:8")).transport.peer
            swarm.network.partition([first], [last])
            await asyncio.sleep(60)
            client = await swarm.join("client", is_client=True)
            said = (await Watcher(client, swarm.model.fingerprint).refresh()).servers[first].announcement
            assert said.next_rtts == {short_peer(last): UNREACHABLE_RTT_S}

    run_virtual(scenario())


def test_what_another_reader_of_the_server_has_seen_since_is_not_read_again() -> None:
    async def scenario() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("first", "0:4")
            last = (await swarm.serve("last", "4:8")).transport.peer
            peer = await swarm.join("measuring")
            watcher = CountingWatcher(peer, swarm.model.fingerprint)
            followers = Followers(peer, watcher, lambda: range(4), rng=random.Random(0))
            await watcher.refresh()
            measuring = asyncio.create_task(followers.keep_measured((60.0, 60.0, 60.0)))
            await asyncio.sleep(1)
            assert (watcher.num_readings, list(followers.next_rtts)) == (1, [short_peer(last)])
            await asyncio.sleep(60)
            assert watcher.num_readings == 2, "nobody else has read for a period"
            await watcher.refresh()
            await asyncio.sleep(60)
            assert watcher.num_readings == 3
            measuring.cancel()
            await asyncio.wait([measuring])

    run_virtual(scenario())
