"""A server with a full line refuses a step: it gets it again, and nothing that it holds is built anew."""

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import StepInput
from corolla.clock import loop_time
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.hosted import DataLink, HostedSession
from corolla.server.steps import _too_many_steps
from corolla.wire.messages import Step

CHUNKS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_refused_step_is_repeated_with_those_behind_it_and_nothing_is_computed_twice(name: str) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4, conditions=LinkConditions(0.01)) as swarm:
            handlers = [await swarm.serve("a", "0:2"), await swarm.serve("b", "2:4")]
            steps = swarm.handlers[name]._steps
            act = steps._act
            refused: list[int] = []

            def act_once(session: HostedSession, link: DataLink, step: Step) -> bool:
                if step.step_no == 2 and not refused:
                    refused.append(step.step_no)
                    steps._replies.refuse_step(session, step, _too_many_steps(2, 1))
                    return True
                return act(session, link, step)

            steps._act = act_once
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                await session.step(hidden_of([[0]]), num_tokens=1, want="none")
                outputs = await session.run([StepInput(hidden_of([chunk]), len(chunk)) for chunk in CHUNKS], want="all")
                got = [number for output in outputs if output is not None for number in numbers_of(output)]
                assert got == whole_model(4, range(10))[1:]
            assert refused
            assert [handler.counters.tokens for handler in handlers] == [10, 10]
            assert client.router(swarm.model).book.banned(loop_time()) == {}

    run_virtual(told())
