"""A session's first steps go right behind `Open`: a round trip sooner, and never wrong when a server says no."""

from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.paced import Pace, PacedSpan
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import Session, StepInput
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import BadInput, CacheFull, Overloaded
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.control import Control
from corolla.server.handler import Handler
from corolla.wire import messages as wire

NUM_BLOCKS = 6
ONE_WAY_S = 0.05
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def play(story: Callable[[MemorySwarm, Swarm], Awaitable[None]]) -> None:
    """Two servers and one client, who has had a session with them."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(ONE_WAY_S)) as swarm:
            await swarm.serve("a", "0:3")
            await swarm.serve("b", "3:6")
            client = await swarm.client("client")
            await begin(swarm, client)
            await story(swarm, client)

    run_virtual(told())


async def begin(swarm: MemorySwarm, client: Swarm) -> Session:
    """A session that has the prompt behind it, in several steps; what came back is right."""
    session = client.new_session(swarm.model, max_tokens=64)
    steps = [StepInput(hidden_of([PROMPT[i : i + 2]]), 2) for i in range(0, len(PROMPT), 2)]
    outputs = await session.begin(lambda: steps, want="all")
    got = [number for output in outputs if output is not None for number in numbers_of(output)]
    assert got == whole_model(NUM_BLOCKS, PROMPT)
    session.close()
    return session


def refuse(handler: Handler, refused: Overloaded | CacheFull) -> None:
    def open_session(control: Control, ask: wire.Open) -> None:
        handler._replies.refuse_open(control.channel, ask, refused)

    handler.open_session = open_session


def test_the_servers_compute_while_a_far_one_has_yet_to_say_that_it_is_open() -> None:
    """In memory a dial takes a round trip, as opening does; so what is saved shows where the head is near."""
    step_s, far_s = 0.2, 0.05

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.001)) as swarm:
            for name, start in (("a", 0), ("b", 2), ("c", 4)):
                pace = Pace(step_s)
                runner = PacedSpan(start, start + 2, pace)
                await swarm.serve(name, f"{start}:{start + 2}", runner=runner, executor=pace.executor)
            client = await swarm.client("client")
            far = swarm.handlers["b"].transport.peer
            swarm.network.set_conditions(client.own_peer, far, LinkConditions(far_s))
            steps = [StepInput(hidden_of([PROMPT]), len(PROMPT))]
            took_s: list[float] = []
            for _ in range(2):
                began, session = loop_time(), client.new_session(swarm.model, max_tokens=64)
                await session.begin(lambda: steps, want="all")
                took_s.append(loop_time() - began)
                session.close()
            began = loop_time()
            async with client.open_session(swarm.model, max_tokens=64) as session:
                await session.run(steps, want="all")
            in_turn_s = loop_time() - began
            assert in_turn_s - took_s[1] == pytest.approx(2 * far_s, rel=0.1)
            assert took_s[1] < took_s[0], "the first has nothing to go by, and has to dial"

    run_virtual(told())


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("refused", [Overloaded("not you"), CacheFull("no room")])
def test_where_a_server_says_no_another_is_given_the_steps(name: str, refused: Overloaded | CacheFull) -> None:
    async def story(swarm: MemorySwarm, client: Swarm) -> None:
        await swarm.serve("other", {"a": "0:3", "b": "3:6"}[name])
        refuse(swarm.handlers[name], refused)
        before = {name: handler.counters.steps for name, handler in swarm.handlers.items()}
        await client.router(swarm.model).refresh()
        await begin(swarm, client)
        assert swarm.handlers[name].counters.steps == before[name]

    play(story)


@pytest.mark.parametrize("name", ["a", "b"])
def test_where_the_only_server_says_no_the_user_hears_it_at_once_and_nothing_is_held(name: str) -> None:
    async def story(swarm: MemorySwarm, client: Swarm) -> None:
        refuse(swarm.handlers[name], CacheFull("no room"))
        began, session = loop_time(), client.new_session(swarm.model, max_tokens=64)
        with pytest.raises(CacheFull, match="no room"):
            await session.begin(lambda: [StepInput(hidden_of([PROMPT]), len(PROMPT))], want="all")
        assert loop_time() - began < 2
        assert session.is_closed
        assert client.journals.claimed_bytes == 0
        with pytest.raises(BadInput, match="closed"):
            await session.run([StepInput(hidden_of([PROMPT]), len(PROMPT))], want="all")

    play(story)


def test_what_cannot_fit_is_the_callers_mistake_and_never_sent() -> None:
    async def story(swarm: MemorySwarm, client: Swarm) -> None:
        steps = [handler.counters.steps for handler in swarm.handlers.values()]
        session = client.new_session(swarm.model, max_tokens=4)
        with pytest.raises(BadInput, match="do not fit"):
            await session.begin(lambda: [StepInput(hidden_of([PROMPT]), len(PROMPT))], want="all")
        session.close()
        assert [handler.counters.steps for handler in swarm.handlers.values()] == steps

    play(story)


def test_with_servers_that_have_said_nothing_yet_the_first_steps_wait() -> None:
    """How long a step may be, and whether it needs token ids, is for them to say."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(ONE_WAY_S)) as swarm:
            handlers = [await swarm.serve("a", "0:3"), await swarm.serve("b", "3:6")]
            client = await swarm.client("client")
            session = client.new_session(swarm.model, max_tokens=64)

            def cut() -> list[StepInput]:
                assert all(handler.counters.sessions_opened for handler in handlers)
                assert session.max_chunk_tokens > 0
                return [StepInput(hidden_of([PROMPT]), len(PROMPT))]

            await session.begin(cut, want="all")
            session.close()

    run_virtual(told())
