"""What faults that come together call for: each is judged by the route on which it came."""

import asyncio
from typing import Any, cast

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.errors import BadUpstream, SwarmError, Unsupported
from corolla.net.memory.loop import run_virtual


@pytest.mark.parametrize("complaint", [Unsupported("hidden states of shape [6]"), BadUpstream("not finite")], ids=repr)
def test_who_complains_twice_of_the_server_before_it_is_not_to_blame(complaint: SwarmError) -> None:
    """After the first the client stands between the two; the second was said before that."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                route, inner = session.route, cast(Any, session)
                await session.step(hidden_of([[1]]), num_tokens=1, want="all")
                step = asyncio.create_task(session.step(hidden_of([[2]]), num_tokens=1, want="all"))
                await asyncio.sleep(0.001)
                assert inner._steps.pending, "the step is under way"
                for _ in range(2):
                    session.on_fault(inner._ring.hops[-1], complaint)
                output = await step
                assert output is not None
                assert numbers_of(output) == whole_model(4, [1, 2])[1:]
                assert session.through_client == [2]
                assert session.route == route
                assert client.router(swarm.model).book.banned(asyncio.get_running_loop().time()) == {}

    run_virtual(told())
