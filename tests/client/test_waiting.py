"""When nothing covers a block: the session waits, says so, gives up in the end, and can go on later."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.session import Session, StepInput
from corolla.clock import loop_time
from corolla.errors import MissingBlocks, Unsupported
from corolla.ids import Fingerprint
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.wire.journal import MAX_RECENT

NUM_BLOCKS = 6
WAIT_S = 30.0
CONFIG = ClientConfig(wait_for_servers_s=WAIT_S)

Story = Callable[[MemorySwarm, Session], Awaitable[None]]


def tell(story: Story, *, max_rows: int = 1) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.01)) as swarm:
            await swarm.serve("a", "0:3")
            await swarm.serve("b", "3:6")
            client = await swarm.client("client", CONFIG)
            async with client.open_session(swarm.model, max_tokens=100, max_rows=max_rows) as session:
                await story(swarm, session)

    run_virtual(told(), limit_s=1000)


def kill(swarm: MemorySwarm, name: str) -> None:
    swarm.network.kill(swarm.network.transport(name).peer)


async def feed(session: Session, rows: list[list[int]], new: list[list[int]]) -> list[list[int]]:
    """One step, its output compared with the whole history; the rows after it."""
    rows = [row + more for row, more in zip(rows or [[] for _ in new], new, strict=True)]
    output = await session.step(hidden_of(new), num_tokens=len(new[0]), want="all")
    assert output is not None
    assert numbers_of(output) == [n for row in rows for n in whole_model(NUM_BLOCKS, row)[-len(new[0]) :]]
    return rows


def test_a_server_that_appears_in_time_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2, 3]])
        kill(swarm, "b")
        step = asyncio.create_task(feed(session, rows, [[4]]))
        await asyncio.sleep(WAIT_S / 2)
        assert not step.done()
        assert caplog.messages.count("no server for block(s) 3:6: waiting for one") == 1
        began = loop_time()
        await swarm.serve("c", "3:6")
        await feed(session, await step, [[5]])
        assert loop_time() - began < 3

    with caplog.at_level(logging.WARNING, logger="corolla.client"):
        tell(story)


def test_after_the_time_to_wait_the_blocks_are_named_and_the_session_can_go_on_later() -> None:
    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2, 3]])
        kill(swarm, "b")
        began = loop_time()
        with pytest.raises(MissingBlocks) as missing:
            await feed(session, rows, [[4]])
        assert missing.value.blocks == [3, 4, 5]
        assert WAIT_S <= loop_time() - began < WAIT_S + 10
        assert session.position == 3
        with pytest.raises(MissingBlocks):
            await feed(session, rows, [[5]])
        await asyncio.sleep(300)
        await swarm.serve("c", "3:6")
        rows = await feed(session, rows, [[6, 7]])
        assert session.position == 5
        await feed(session, rows, [[8]])

    tell(story)


def test_servers_that_take_only_shorter_sessions_do_not_cut_the_wait_for_one_that_takes_it() -> None:
    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2, 3]])
        short = await swarm.serve("short", "3:6", limits=SessionLimits(max_session_tokens=99))
        kill(swarm, "b")
        step = asyncio.create_task(feed(session, rows, [[4]]))
        await asyncio.sleep(WAIT_S / 2)
        assert not step.done()
        await swarm.serve("long", "3:6")
        await step
        kill(swarm, "long")
        await asyncio.sleep(300)  # until its announcement is gone
        with pytest.raises(Unsupported) as refused:
            await feed(session, [[1, 2, 3, 4]], [[5]])
        assert (refused.value.value, refused.value.bound) == ("100", "99")
        assert short.counters.refusals == {}

    tell(story)


def test_a_model_that_others_are_served_beside_is_waited_for_too() -> None:
    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2, 3]])
        other = ServedModel("another", Fingerprint("a" * 32), NUM_BLOCKS)
        await swarm.serve("other", "0:6", model=other)
        for name in "ab":
            await swarm.leave(name)
        step = asyncio.create_task(feed(session, rows, [[4]]))
        await asyncio.sleep(WAIT_S / 2)
        assert not step.done()
        await swarm.serve("c", "0:6")
        await step

    tell(story)


def test_a_prompt_of_many_steps_that_failed_never_counted() -> None:
    """More steps than a journal keeps as they were, after a trim and a row gather that ride on the first of them."""

    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2, 3], [4, 5, 6]])
        session.trim(2)
        session.gather([1, 0])
        rows = [rows[1][:2], rows[0][:2]]
        rng = random.Random(1)
        chunks = [[[rng.getrandbits(32)] * 2 for _ in rows] for _ in range(2 * MAX_RECENT)]
        run = asyncio.create_task(session.run([StepInput(hidden_of(chunk), 2) for chunk in chunks], want="last"))
        await asyncio.sleep(0.1)
        kill(swarm, "b")
        with pytest.raises(MissingBlocks):
            await run
        assert session.position == 2
        await swarm.serve("c", "3:6")
        rows = await feed(session, rows, [[7], [8]])
        await feed(session, rows, [[9], [10]])

    tell(story, max_rows=2)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_beams_and_finished_rows_are_in_the_history_that_a_substitute_gets(lost: str) -> None:
    async def story(swarm: MemorySwarm, session: Session) -> None:
        rows = await feed(session, [], [[1, 2], [3, 4], [5, 6]])
        for step in range(12):  # more than are kept as they were sent: gathers are folded into the history
            order = [2, 0, 0] if step % 3 == 0 else [0, 1, 2]
            session.gather(order)
            rows = await feed(session, [list(rows[row]) for row in order], [[10 + step], [20 + step], [30 + step]])
        session.gather([1])  # the others are finished
        rows = await feed(session, [rows[1]], [[7]])
        await swarm.serve("a2", "0:3")
        await swarm.serve("b2", "3:6")
        kill(swarm, lost)
        session.trim(10)
        rows = await feed(session, [rows[0][:10]], [[8]])
        await feed(session, rows, [[9]])
        assert session.recoveries == 1

    tell(story, max_rows=3)
