"""Servers whose journals are far too short for the text: what they cannot replay comes from further back."""

import asyncio

import pytest

from corolla.apps.sim.chaos import live
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.server.journals import Journals

SHORT_BYTES = 40
"""A few positions of the toy."""


@pytest.fixture
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own is as long as ever."""
    monkeypatch.setattr("corolla.server.handler.MAX_JOURNAL_BYTES", SHORT_BYTES)


@pytest.mark.usefixtures("short_journals")
@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_the_first_recovery_already_goes_back_as_far_as_it_must(lost: str) -> None:
    """To the client, since no server's journal is whole: with one loss, one recovery, and no vain try before."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.01)) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                for number in range(30):
                    if number == 25:
                        await swarm.serve("another", {"a": "0:2", "b": "2:4", "c": "4:6"}[lost])
                        swarm.network.kill(swarm.network.transport(lost).peer)
                    output = await session.step(hidden_of([[number]]), num_tokens=1, want="last")
                    assert output is not None
                    assert numbers_of(output) == whole_model(6, range(number + 1))[-1:]
                assert session.recoveries == 1

    run_virtual(told())


@pytest.mark.usefixtures("short_journals")
def test_random_lives_go_well_with_short_journals() -> None:
    lives = [live(seed) for seed in range(40_000, 40_016)]
    assert sum(life.recoveries for life in lives) > len(lives)


NUM_SESSIONS, NUM_STEPS = 8, 24
SHARED_BYTES = 8 * NUM_SESSIONS * NUM_STEPS // 2
"""Half of what they write."""


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_many_sessions_on_one_server_stay_within_its_bound_and_all_survive_a_loss(lost: str) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.01)) as swarm:
            spans = {"a": "0:2", "b": "2:4", "c": "4:6"}
            limits = SessionLimits(max_journal_bytes=SHARED_BYTES)
            handlers = [await swarm.serve(name, span, limits=limits) for name, span in spans.items()]
            clients = [await swarm.client(name) for name in ("first", "second")]

            async def write(number: int) -> int:
                async with clients[number % 2].open_session(swarm.model, max_tokens=64) as session:
                    for position in range(NUM_STEPS):
                        output = await session.step(hidden_of([[position]]), num_tokens=1, want="last")
                        assert output is not None
                        assert numbers_of(output) == whole_model(6, range(position + 1))[-1:]
                        assert all(handler.journals.total_bytes <= SHARED_BYTES for handler in handlers)
                        if position == NUM_STEPS - 4:
                            await at_the_loss.wait()
                    return session.recoveries

            at_the_loss = asyncio.Barrier(NUM_SESSIONS + 1)
            async with asyncio.TaskGroup() as group:
                writers = [group.create_task(write(number)) for number in range(NUM_SESSIONS)]
                assert await swarm.serve("another", spans[lost], limits=limits)
                await at_the_loss.wait()
                assert handlers[0].journals.num_shed > 0
                swarm.network.kill(swarm.network.transport(lost).peer)
            assert all(writer.result() == 1 for writer in writers)
            await asyncio.sleep(1)
            living = [handler for name, handler in swarm.handlers.items() if name != lost]
            assert [handler.journals.total_bytes for handler in living] == [0] * 3

    run_virtual(told())


def test_random_lives_go_well_where_all_sessions_share_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.server.handler.Journals", lambda _most: Journals(2 * SHORT_BYTES))
    lives = [live(seed) for seed in range(41_000, 41_016)]
    assert sum(life.recoveries for life in lives) > len(lives)
