"""One of three servers is lost: the others keep what they hold, and compute no token twice."""

import asyncio

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import Session
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual

SPANS = {"first": "0:2", "middle": "2:4", "last": "4:6"}
PROMPT, BEFORE, AFTER = [3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8]
ALL = [*PROMPT, *BEFORE, *AFTER]
IN_A_STEP_S = 0.015
"""From one server to the next it takes 10 ms: the step has been through the first one then."""


async def feed(session: Session, numbers: list[int]) -> list[int]:
    output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
    assert output is not None
    return numbers_of(output)


@pytest.mark.parametrize("is_in_a_step", [False, True])
@pytest.mark.parametrize("lost", SPANS)
def test_survivors_compute_no_token_twice(lost: str, is_in_a_step: bool) -> None:
    async def story() -> None:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.01)) as swarm:
            for name, span in SPANS.items():
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                got = await feed(session, PROMPT)
                for number in BEFORE:
                    got += await feed(session, [number])
                await swarm.serve("substitute", SPANS[lost])
                step = asyncio.create_task(feed(session, AFTER[:1])) if is_in_a_step else None
                await asyncio.sleep(IN_A_STEP_S)
                swarm.network.kill(swarm.handlers[lost].transport.peer)
                got += await (step or feed(session, AFTER[:1]))
                for number in AFTER[1:]:
                    got += await feed(session, [number])
                assert got == whole_model(6, ALL)
                assert session.recoveries == 1
            computed = {name: swarm.handlers[name].counters.tokens for name in (*SPANS, "substitute") if name != lost}
            assert computed == dict.fromkeys(computed, len(ALL))

    run_virtual(story())
