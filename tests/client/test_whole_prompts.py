"""A family that takes several positions only as the first: servers come and go, and nobody ever sends it others.

Its code would drop the state that it holds and say nothing, so that the text goes on, wrong.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.chunks import cut_into_steps
from corolla.client.config import ClientConfig
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.errors import Unsupported
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

NUM_BLOCKS = 6
SPANS = ("0:2", "2:4", "4:6")
PROMPT = list(range(8))
NUM_STEPS = 30
"""More than a journal keeps as they were sent, and more than `SHORT` takes at once."""
SHORT = SessionLimits(max_chunk_tokens=8)


class ForgetfulSpan(ToySpan):
    """Drops its state when several positions come onto it, as transformers' mamba does."""

    def __init__(self, start: int, end: int, *, forgets: bool = True) -> None:
        super().__init__(start, end)
        facts = self.facts
        self.facts = SpanFacts(
            start, end, facts.hidden_size, facts.dtype, can_trim=False, prefill_in_chunks=not forgets
        )
        self.longest_onto_some = 0
        """Positions in the longest step that came onto a state."""

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        if cache.num_tokens > 0:
            self.longest_onto_some = max(self.longest_onto_some, step.hidden.shape[1])
        return super().run(cache, step, want, wire_dtype)


class Scene:
    """A swarm of such servers and one session that writes."""

    def __init__(self, swarm: MemorySwarm, limits: SessionLimits, *, forgetful: Sequence[str]) -> None:
        self.swarm = swarm
        self.spans: list[ForgetfulSpan] = []
        self.written: list[int] = []
        self._limits = limits
        self._forgetful = forgetful

    async def serve(self, name: str, span: str) -> None:
        runner = ForgetfulSpan(*map(int, span.split(":")), forgets=span in self._forgetful)
        self.spans.append(runner)
        await self.swarm.serve(name, span, runner=runner, limits=self._limits)

    async def write(self, session: Session, numbers: list[int]) -> None:
        self.written += numbers
        output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="last")
        assert output is not None
        assert numbers_of(output) == whole_model(NUM_BLOCKS, self.written)[-1:]

    def assert_nobody_forgot(self) -> None:
        assert all(span.longest_onto_some <= 1 for span in self.spans if not span.facts.prefill_in_chunks)


@asynccontextmanager
async def writing(
    limits: SessionLimits, *, exact: bool = False, forgetful: Sequence[str] = SPANS
) -> AsyncIterator[tuple[Scene, Session]]:
    """A session that has a prompt and many single positions behind it."""
    async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.01)) as swarm:
        scene = Scene(swarm, limits, forgetful=forgetful)
        for span in SPANS:
            await scene.serve(f"first {span}", span)
        client = await swarm.client("client", ClientConfig(exact=exact))
        async with client.open_session(swarm.model, max_tokens=300) as session:
            await scene.write(session, PROMPT)
            for number in range(NUM_STEPS):
                await scene.write(session, [100 + number])
            yield scene, session
            scene.assert_nobody_forgot()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("limits", [SessionLimits(), SHORT], ids=["all at once", "too long for one step"])
@pytest.mark.parametrize("lost", [["0:2"], ["2:4"], ["4:6"], ["2:4", "4:6"], [*SPANS]], ids=str)
def test_a_lost_server_is_rebuilt_by_what_the_family_takes(
    lost: list[str], limits: SessionLimits, *, exact: bool
) -> None:
    async def told() -> None:
        async with writing(limits, exact=exact) as (scene, session):
            for _ in range(2):  # the second time from journals that replays have filled
                for span in lost:
                    await scene.serve(f"next {len(scene.spans)}", span)
                    scene.swarm.network.kill(
                        next(hop.peer_id for hop in session.route if span == f"{hop.start}:{hop.end}")
                    )
                for number in range(10):
                    await scene.write(session, [200 + number])
            assert session.recoveries == 2

    run_virtual(told(), limit_s=1000)


@pytest.mark.parametrize("limits", [SessionLimits(), SHORT], ids=["all at once", "too long for one step"])
@pytest.mark.parametrize("leaving", SPANS)
def test_one_that_leaves_is_replaced_by_what_the_family_takes(leaving: str, limits: SessionLimits) -> None:
    """Its substitute catches up with what was written while it stood by: more than are kept as they were sent."""

    async def told() -> None:
        async with writing(limits) as (scene, session):
            await scene.serve("substitute", leaving)
            substitute = scene.swarm.handlers["substitute"].transport.peer
            scene.swarm.network.set_conditions(
                scene.swarm.network.transport("client").peer, substitute, LinkConditions(0.2)
            )
            leaves = asyncio.create_task(scene.swarm.leave(f"first {leaving}"))
            while not leaves.done():
                await scene.write(session, [300 + len(scene.written)])
                assert session.recoveries <= 1
            await leaves
            assert substitute in [hop.peer_id for hop in session.route]
            await scene.write(session, [400])

    run_virtual(told(), limit_s=1000)


def test_the_substitute_of_one_that_leaves_says_when_it_has_caught_up_though_nobody_writes() -> None:
    """What comes in many pieces lies unread for a while, the last of them too."""

    async def told() -> None:
        async with writing(SHORT) as (scene, session):
            await scene.serve("substitute", "2:4")
            began = loop_time()
            await scene.swarm.leave("first 2:4")
            assert loop_time() - began < 5
            assert session.recoveries == 1
            await scene.write(session, [400])

    run_virtual(told(), limit_s=1000)


def test_one_that_takes_chunks_sends_none_to_one_that_does_not() -> None:
    """What a server sends again goes by what the receiver can: blocks of one model may be of several kinds."""

    async def told() -> None:
        async with writing(SHORT, forgetful=["4:6"]) as (scene, session):
            await scene.serve("substitute", "4:6")
            scene.swarm.network.kill(session.route[-1].peer_id)
            await scene.write(session, [400])
            assert session.recoveries == 1

    run_virtual(told(), limit_s=1000)


def test_several_positions_onto_others_are_refused_and_nobody_is_banned_for_it() -> None:
    async def told() -> None:
        async with writing(SessionLimits()) as (scene, session):
            with pytest.raises(Unsupported, match="2 positions in one step onto 38"):
                await session.step(hidden_of([[1, 2]]), num_tokens=2, want="last")
            await scene.write(session, [500])
            assert {name for name, handler in scene.swarm.handlers.items() if handler.sessions} == {
                f"first {span}" for span in SPANS
            }

    run_virtual(told(), limit_s=1000)


def test_the_next_turn_of_a_conversation_goes_in_single_positions() -> None:
    async def told() -> None:
        async with writing(SessionLimits()) as (_, session):
            steps = cut_into_steps(session, torch.zeros(1, 5, 2), max_chunk_tokens=2048)
            assert [step.num_tokens for step in steps] == [1] * 5

    run_virtual(told(), limit_s=1000)
