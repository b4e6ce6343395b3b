"""The pages' picture of a swarm: it follows who joins, leaves and dies, and tells what changed."""

import asyncio

import pytest

from corolla.apps.gateway.observer import Observer, ObserverConfig, SwarmState
from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.router import ServedModel
from corolla.net.memory.loop import run_virtual
from corolla.swarm.announcement import ModelEntry

QUICK = ObserverConfig(watched_period_s=3, unwatched_period_s=60)


def kinds(state: SwarmState) -> list[tuple[str, str]]:
    """What changed and whose it was, the oldest first."""
    return [(change.kind, change.name) for change in reversed(state.changes)]


def health(state: SwarmState) -> str:
    [status] = state.models
    return status.counted.health


async def next_state(observer: Observer) -> SwarmState:
    state = await observer.wait_for_news(observer.state.number, 90)
    assert state is not None
    return state


def test_a_killed_server_is_not_counted_on_though_its_announcement_stands() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:4")
            await swarm.serve("cellar", "4:8")
            observer = Observer(await swarm.join("gateway", is_client=True), config=QUICK)
            assert health(await observer.look()) == "fragile"
            [cellar] = [s.peer for s in observer.state.models[0].view.servers.values() if s.start == 4]
            swarm.network.kill(cellar)
            assert health(await observer.look()) == "fragile"  # one lost answer says little
            state = await observer.look()
            assert health(state) == "broken"
            assert state.models[0].counted.missing_blocks == [4, 5, 6, 7]
            assert len(state.models[0].view.servers) == 2
            assert kinds(state) == [("silent", "cellar"), ("health", "")]
            await swarm.serve("garage", "4:8")
            state = await observer.look()
            assert health(state) == "fragile"
            assert kinds(state)[2:] == [("joined", "garage"), ("health", "")]

    run_virtual(live())


def test_a_crowd_that_announces_another_depth_hides_no_server_of_a_model_that_the_gateway_serves() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:8")
            model = swarm.model
            for number in range(3):
                await swarm.serve(f"liar {number}", "0:8", model=ServedModel(model.name, model.fingerprint, 9))
            entry = ModelEntry(name=model.name, fingerprint=model.fingerprint, num_blocks=model.num_blocks)
            observer = Observer(await swarm.join("gateway", is_client=True), served=[entry], config=QUICK)
            assert health(await observer.look()) == "fragile"
            [attic] = observer.state.models[0].view.servers.values()
            assert (attic.announcement.name, attic.end) == ("attic", 8)

    run_virtual(live())


def test_whoever_leaves_is_told_apart_from_whoever_dies() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:8")
            await swarm.serve("cellar", "0:8")
            observer = Observer(await swarm.join("gateway", is_client=True), config=QUICK)
            assert health(await observer.look()) == "healthy"
            await swarm.leave("cellar")
            state = await observer.look()
            assert kinds(state) == [("left", "cellar"), ("health", "")]
            assert (state.changes[0].before, state.changes[0].now) == ("healthy", "fragile")

    run_virtual(live())


def test_a_watcher_makes_looks_frequent_and_sees_each() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:8")
            observer = Observer(await swarm.join("gateway", is_client=True), config=QUICK)
            loop = asyncio.get_running_loop()
            looking = loop.create_task(observer.keep_observed())
            try:
                await next_state(observer)
                began = loop.time()
                await next_state(observer)
                assert loop.time() - began == pytest.approx(QUICK.unwatched_period_s, abs=1)
                with observer.watching():
                    await next_state(observer)  # the first watcher does not wait for the rest of the minute
                    began = loop.time()
                    await next_state(observer)
                    assert loop.time() - began == pytest.approx(QUICK.watched_period_s, abs=1)
            finally:
                looking.cancel()

    run_virtual(live())


def test_a_large_swarm_is_pinged_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.apps.gateway.observer.MAX_PINGED", 4)

    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            for number in range(6):
                await swarm.serve(f"server {number}", "0:8")
            observer = Observer(await swarm.join("gateway", is_client=True))
            for known in (4, 6):
                [status] = (await observer.look()).models
                assert sum(server.rtt_s is not None for server in status.view.servers.values()) == known

    run_virtual(live())


def test_no_news_ends_the_wait() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            observer = Observer(await swarm.join("gateway", is_client=True))
            assert await observer.wait_for_news(0, 1.0) is None

    run_virtual(live())


def test_a_served_model_is_shown_while_nobody_serves_it() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            entry = ModelEntry(name="toy", fingerprint=swarm.model.fingerprint, num_blocks=8)
            observer = Observer(await swarm.join("gateway", is_client=True), served=[entry])
            assert health(await observer.look()) == "broken"
            await swarm.serve("attic", "0:8")
            assert health(await observer.look()) == "fragile"

    run_virtual(live())


def test_only_so_many_watch_at_once() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            observer = Observer(await swarm.join("g", is_client=True), config=ObserverConfig(max_watchers=1))
            with observer.watching():
                assert observer.is_crowded
            assert not observer.is_crowded

    run_virtual(live())
