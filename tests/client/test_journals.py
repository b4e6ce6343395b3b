"""All sessions of a client together keep no more than so much; whoever has to give up says so when it matters."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.journals import GRAIN_BYTES, Journals
from corolla.client.session import Session
from corolla.errors import BadInput, Overloaded, SessionLost
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual

NUM_BLOCKS = 4


class Holder:
    def __init__(self, journal_bytes: int = 0, *, is_idle: bool = True) -> None:
        self.journal_bytes = journal_bytes
        self.is_idle = is_idle
        self.gave_up = False

    def give_up_journal(self) -> None:
        self.gave_up, self.journal_bytes = True, 0


def test_the_longest_unused_gives_up_first_and_only_as_many_as_must() -> None:
    journals = Journals(10 * GRAIN_BYTES)
    a, b, c, d = [Holder() for _ in range(4)]
    for holder in (a, b, c):
        journals.claim(holder, 3 * GRAIN_BYTES)
        holder.journal_bytes = 3 * GRAIN_BYTES
    journals.claim(a, 0)  # used again
    journals.claim(d, 2 * GRAIN_BYTES)
    assert [holder.gave_up for holder in (a, b, c, d)] == [False, True, False, False]
    assert journals.claimed_bytes == 8 * GRAIN_BYTES


def test_who_runs_keeps_its_journal_and_without_room_the_run_is_refused() -> None:
    journals = Journals(4 * GRAIN_BYTES)
    busy, idle, late = Holder(3 * GRAIN_BYTES, is_idle=False), Holder(GRAIN_BYTES), Holder()
    journals.claim(busy, 0)
    journals.claim(idle, 0)
    with pytest.raises(Overloaded) as refused:
        journals.claim(late, 2 * GRAIN_BYTES)
    assert (refused.value.value, refused.value.bound) == (str(5 * GRAIN_BYTES), str(4 * GRAIN_BYTES))
    assert not idle.gave_up, "that would not have helped"
    journals.claim(late, GRAIN_BYTES)
    assert idle.gave_up
    assert not busy.gave_up


def test_what_was_trimmed_or_closed_counts_no_more() -> None:
    journals = Journals(4 * GRAIN_BYTES)
    trimmed, closed, late = Holder(2 * GRAIN_BYTES), Holder(2 * GRAIN_BYTES), Holder()
    for holder in (trimmed, closed):
        journals.claim(holder, 0)
    trimmed.journal_bytes = 5
    journals.forget(closed)
    journals.forget(closed)
    journals.claim(late, 3 * GRAIN_BYTES)
    assert not trimmed.gave_up


def test_no_room_at_all_is_a_mistake() -> None:
    with pytest.raises(BadInput, match="max_journal_bytes"):
        ClientConfig(max_journal_bytes=0)


@pytest.fixture
def to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.client.journals.GRAIN_BYTES", 1)


def tell(story: Callable[[MemorySwarm, list[Session]], Awaitable[None]]) -> None:
    """Three sessions of three tokens, in all one more than may be kept; the first has just given its journal up."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.005)) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("b2", "2:4")):
                await swarm.serve(name, span)
            client = await swarm.client("client", ClientConfig(max_journal_bytes=8 * hidden_of([[0]]).nbytes))
            sessions = [await client.start_session(swarm.model, max_tokens=64) for _ in range(3)]
            for session in sessions:
                for number in range(3):
                    await write(session, number)
            assert [session.survives_any_loss for session in sessions] == [False, True, True]
            await story(swarm, sessions)
            for session in sessions:
                session.close()
            assert client.journals.claimed_bytes == 0

    run_virtual(told())


async def write(session: Session, number: int) -> None:
    """The text counts up from 0."""
    output = await session.step(hidden_of([[number]]), num_tokens=1, want="last")
    assert output is not None
    assert numbers_of(output) == whole_model(NUM_BLOCKS, range(number + 1))[-1:]


@pytest.mark.usefixtures("to_the_byte")
def test_without_its_journal_a_session_goes_on_and_survives_the_loss_of_all_but_the_first_server() -> None:
    async def story(swarm: MemorySwarm, sessions: list[Session]) -> None:
        await write(sessions[0], 3)
        swarm.network.kill(sessions[0].route[1].peer_id)
        await write(sessions[0], 4)
        assert sessions[0].recoveries == 1

    tell(story)


@pytest.mark.usefixtures("to_the_byte")
def test_a_lost_first_server_is_the_end_only_of_sessions_without_their_journal() -> None:
    async def story(swarm: MemorySwarm, sessions: list[Session]) -> None:
        swarm.network.kill(swarm.network.transport("a").peer)
        await swarm.serve("a2", "0:2")
        await write(sessions[1], 3)
        for _ in range(2):  # and it stays so
            with pytest.raises(SessionLost, match="3 positions again, which this client gave up"):
                await write(sessions[0], 3)
        await write(sessions[2], 3)

    tell(story)


@pytest.mark.usefixtures("to_the_byte")
def test_a_run_that_finds_no_room_is_refused_before_anything_is_sent_and_can_go_on_later() -> None:
    async def story(_swarm: MemorySwarm, sessions: list[Session]) -> None:
        running = [asyncio.create_task(write(session, 3)) for session in sessions[1:]]
        await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="let some end, or raise max_journal_bytes"):
            await write(sessions[0], 3)
        await asyncio.gather(*running)
        assert sessions[0].position == 3
        await write(sessions[0], 3)

    tell(story)
