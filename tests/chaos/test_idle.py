"""A session that rests for longer than servers keep it: they say so, and the next step builds it again."""

import asyncio
from dataclasses import replace

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import Session
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits

IDLE_S = 30.0
LIMITS = SessionLimits(idle_timeout_s=IDLE_S)


async def feed(session: Session, numbers: list[int]) -> list[int]:
    output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
    assert output is not None
    return numbers_of(output)


@pytest.mark.parametrize("expiring", [{"a"}, {"b"}, {"c"}, {"a", "b", "c"}], ids=lambda names: "".join(sorted(names)))
def test_what_expired_is_built_again_on_the_next_step_and_nobody_is_to_blame(expiring: set[str]) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=6) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
                limits = LIMITS if name in expiring else replace(LIMITS, idle_timeout_s=10 * IDLE_S)
                await swarm.serve(name, span, limits=limits)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                text = await feed(session, [1, 2, 3])
                route = session.route
                for number in (4, 5):
                    await asyncio.sleep(IDLE_S + 1)
                    held = {name for name, handler in swarm.handlers.items() if handler.sessions}
                    assert held == swarm.handlers.keys() - expiring
                    text += await feed(session, [number])
                assert text == whole_model(6, [1, 2, 3, 4, 5])
                assert session.recoveries == 2
                assert session.route == route
                assert client.router(swarm.model).book.banned(asyncio.get_running_loop().time()) == {}

    run_virtual(told())


def test_a_session_at_work_does_not_expire() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            await swarm.serve("a", "0:2", limits=LIMITS)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                for number in range(5):
                    await feed(session, [number])
                    await asyncio.sleep(IDLE_S - 1)
                assert session.recoveries == 0

    run_virtual(told())
