"""A server called dead that was alive: it costs time, no text, and is counted where the user can see it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.session import Session
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.net.liveness import Liveness
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual

NUM_BLOCKS = 4


async def write(session: Session, written: list[int], new: int) -> None:
    written.append(new)
    output = await session.step(hidden_of([[new]]), num_tokens=1, want="last")
    assert output is not None
    assert numbers_of(output) == whole_model(NUM_BLOCKS, written)[-1:]


def play(
    story: Callable[[MemorySwarm, Swarm, Session, list[int]], Awaitable[None]], liveness: Liveness | None = None
) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.005)) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("a2", "0:2"), ("b2", "2:4")):
                await swarm.serve(name, span)
            client = await swarm.client("client", ClientConfig(liveness=liveness or Liveness()))
            written = list[int]()
            async with client.open_session(swarm.model, max_tokens=64) as session:
                await write(session, written, 1)
                await story(swarm, client, session, written)
                await write(session, written, 99)

    run_virtual(told(), limit_s=1000)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("liveness", [Liveness(), Liveness(interval_s=0.2, dead_after_s=0.6)])
def test_a_frozen_server_is_replaced_as_soon_as_it_counts_as_dead(liveness: Liveness, place: int) -> None:
    async def story(swarm: MemorySwarm, _client: Swarm, session: Session, written: list[int]) -> None:
        frozen = session.route[place].peer_id
        swarm.network.freeze(frozen)
        began = loop_time()
        await write(session, written, 2)
        assert liveness.dead_after_s - liveness.interval_s <= loop_time() - began < liveness.dead_after_s + 0.4
        assert frozen not in {hop.peer_id for hop in session.route}

    play(story, liveness)


def test_a_server_that_freezes_for_a_second_is_a_false_alarm_that_costs_only_time() -> None:
    async def story(swarm: MemorySwarm, client: Swarm, session: Session, written: list[int]) -> None:
        frozen = session.route[1].peer_id
        swarm.network.freeze(frozen)
        await write(session, written, 2)
        assert frozen not in {hop.peer_id for hop in session.route}
        assert (session.false_alarms, client.false_alarms) == (0, 0), "nobody knows yet"
        swarm.network.thaw(frozen)
        await asyncio.sleep(1)
        assert (session.false_alarms, client.false_alarms) == (1, 1)
        left = [handler for handler in swarm.handlers.values() if handler.transport.peer == frozen]
        assert not left[0].sessions, "it has given the session's place back"
        await write(session, written, 3)
        await asyncio.sleep(100)
        assert (session.false_alarms, client.false_alarms) == (1, 1), "one freeze is one alarm"

    play(story, Liveness(interval_s=0.2, dead_after_s=0.6))


def test_a_link_that_is_cut_for_a_while_is_a_false_alarm_too() -> None:
    async def story(swarm: MemorySwarm, client: Swarm, session: Session, written: list[int]) -> None:
        mine, other = swarm.network.transport("client").peer, session.route[0].peer_id
        swarm.network.partition([mine], [other])
        await write(session, written, 2)
        swarm.network.heal([mine], [other])
        await asyncio.sleep(1)
        assert (session.false_alarms, client.false_alarms) == (1, 1)

    play(story)


def test_a_server_that_is_really_gone_is_no_false_alarm() -> None:
    async def story(swarm: MemorySwarm, client: Swarm, session: Session, written: list[int]) -> None:
        swarm.network.kill(session.route[0].peer_id)
        await write(session, written, 2)
        swarm.network.freeze(session.route[1].peer_id)
        await write(session, written, 3)
        await asyncio.sleep(100)
        assert session.recoveries == 2
        assert (session.false_alarms, client.false_alarms) == (0, 0)

    play(story)
