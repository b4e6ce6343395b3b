"""Leaving a server that still serves, because it drains or has become slow: make before break, and not too often."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from corolla.apps.sim.paced import Pace, PacedSpan
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.errors import MissingBlocks, Overloaded
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.control import Control
from corolla.server.handler import Handler
from corolla.server.hosted import DataLink, HostedSession
from corolla.wire import messages as wire

NUM_BLOCKS = 6
STEP_S = 0.02
TWENTY_TIMES = 20
NEVER_S = 2_000
"""Longer than any session here lasts."""


@dataclass(slots=True)
class Scene:
    """A swarm of paced servers and one session that writes."""

    swarm: MemorySwarm
    paces: dict[str, Pace] = field(default_factory=dict[str, Pace])
    written: list[int] = field(default_factory=list[int])
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def serve(self, name: str, span: str, step_s: float = STEP_S) -> None:
        start, end = map(int, span.split(":"))
        pace = self.paces[name] = Pace(step_s)
        await self.swarm.serve(name, span, runner=PacedSpan(start, end, pace), executor=pace.executor)

    def name_of(self, peer: str) -> str:
        return next(name for name in self.paces if self.swarm.network.transport(name).peer == peer)

    def in_use(self, session: Session) -> list[str]:
        return [self.name_of(hop.peer_id) for hop in session.route]

    async def write(self, session: Session, num_tokens: int) -> list[float]:
        """So many single steps, each output compared; the seconds that each took."""
        steps_s: list[float] = []
        for _ in range(num_tokens):
            self.written.append(self.rng.getrandbits(32))
            began = loop_time()
            output = await session.step(hidden_of([self.written[-1:]]), num_tokens=1, want="last")
            steps_s.append(loop_time() - began)
            assert output is not None
            assert numbers_of(output) == whole_model(NUM_BLOCKS, self.written)[-1:]
        return steps_s


def play(story: Callable[[Scene, Session], Awaitable[None]], *spans: str) -> None:
    """Two servers of each span, and a session over one of each."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.002)) as swarm:
            scene = Scene(swarm)
            for number, span in enumerate(spans):
                await scene.serve(f"a{number}", span)
                await scene.serve(f"b{number}", span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=1000) as session:
                await story(scene, session)

    run_virtual(told(), limit_s=10_000)


def test_a_server_that_becomes_twenty_times_slower_is_left_once_and_the_rate_is_back() -> None:
    async def story(scene: Scene, session: Session) -> None:
        before = await scene.write(session, 20)
        slow = scene.in_use(session)[1]
        scene.paces[slow].step_s *= TWENTY_TIMES
        await scene.write(session, 12)
        assert slow not in scene.in_use(session)
        after = await scene.write(session, 200)
        assert session.recoveries == 1, "it moved once"
        assert max(after) < 1.5 * max(before)

    play(story, "0:2", "2:4", "4:6")


def test_a_whole_model_on_one_server_is_moved_to_another() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        (slow,) = scene.in_use(session)
        scene.paces[slow].step_s *= TWENTY_TIMES
        await scene.write(session, 12)
        assert scene.in_use(session) != [slow]
        assert session.recoveries == 1

    play(story, "0:6")


def test_when_all_become_slow_nobody_moves() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        for pace in scene.paces.values():
            pace.step_s *= TWENTY_TIMES
        await scene.write(session, 200)
        assert session.recoveries == 0

    play(story, "0:2", "2:4", "4:6")


def test_where_nothing_better_is_known_the_slow_server_stays() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        slow = scene.in_use(session)[0]
        other = next(name for name in scene.paces if name[1] == slow[1] and name != slow)
        scene.swarm.network.kill(scene.swarm.network.transport(other).peer)
        scene.paces[slow].step_s *= TWENTY_TIMES
        await scene.write(session, 300)
        assert slow in scene.in_use(session)
        assert session.recoveries == 0

    play(story, "0:3", "3:6")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_server_whose_step_never_comes_back_is_replaced_though_it_answers_heartbeats(place: int) -> None:
    """A device that hangs: its queue grows, and nothing is silent."""

    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        stuck = scene.in_use(session)[place]
        scene.paces[stuck].step_s = NEVER_S
        [stalled_s] = await scene.write(session, 1)
        assert stalled_s < 20
        assert stuck not in scene.in_use(session)
        await scene.write(session, 20)
        assert session.recoveries == 1

    play(story, "0:2", "2:4", "4:6")


@pytest.mark.parametrize("place", [0, 1])
def test_a_prompt_at_which_a_server_hangs_goes_on_elsewhere_when_its_time_is_over(place: int) -> None:
    """Of a session's first step nobody knows how long it takes there: it has all the time that a step may take."""

    async def story(scene: Scene, session: Session) -> None:
        stuck = scene.in_use(session)[place]
        scene.paces[stuck].step_s = NEVER_S
        [stalled_s] = await scene.write(session, 1)
        assert 180 <= stalled_s < 190
        assert stuck not in scene.in_use(session)

    play(story, "0:3", "3:6")


def test_where_everybody_hangs_the_step_fails_and_says_whose_blocks_are_missing() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        for name in scene.paces:
            if name[1] == "0":
                scene.paces[name].step_s = NEVER_S
        began = loop_time()
        with pytest.raises(MissingBlocks, match="do not answer") as missing:
            await scene.write(session, 1)
        assert missing.value.blocks == [0, 1, 2]
        assert loop_time() - began < 400

    play(story, "0:3", "3:6")


@pytest.mark.full
def test_a_slow_swarm_is_not_hammered() -> None:
    """Whoever is chosen becomes as slow as the one before: moves come more and more seldom."""

    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        began = loop_time()
        while loop_time() - began < 900:
            for name, pace in scene.paces.items():
                pace.step_s = STEP_S * (TWENTY_TIMES if name in scene.in_use(session) and name[1] == "0" else 1)
            await scene.write(session, 1)
            del scene.written[:]
            session.trim(0)
        assert session.recoveries <= 5

    play(story, "0:3", "3:6")


def test_jitter_moves_nobody() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        for _ in range(300):
            for pace in scene.paces.values():
                pace.step_s = STEP_S * scene.rng.choice((0.5, 1, 1, 1, 1, 1, 1, 2, 2, TWENTY_TIMES))
            await scene.write(session, 1)
        assert session.recoveries == 0

    play(story, "0:2", "2:4", "4:6")


def test_a_tail_that_lies_about_the_others_times_moves_nobody() -> None:
    async def story(scene: Scene, session: Session) -> None:
        await scene.write(session, 20)
        before, tail = scene.in_use(session), scene.in_use(session)[-1]
        (hosted,) = scene.swarm.handlers[tail].sessions.values()
        honest = hosted.push.answer

        def lie(output: wire.Output) -> None:
            slow = wire.HopTiming(0.0, TWENTY_TIMES * STEP_S, 0.0)
            honest(replace(output, timings=[slow, *output.timings[1:]]))

        hosted.push.answer = lie
        await scene.write(session, 100)
        assert scene.in_use(session) == before
        assert session.recoveries == 0

    play(story, "0:2", "2:4", "4:6")


def test_a_server_that_drains_is_left_between_two_steps_without_a_failed_one() -> None:
    async def story(scene: Scene, session: Session) -> None:
        before = await scene.write(session, 20)
        leaving = scene.in_use(session)[1]
        leave = asyncio.create_task(scene.swarm.leave(leaving))
        during = await scene.write(session, 30)
        assert leaving not in scene.in_use(session)
        assert session.recoveries == 1
        assert max(during) < 3 * max(before)
        await leave

    play(story, "0:2", "2:4", "4:6")


def refuse(_scene: Scene, handler: Handler) -> None:
    def open_session(control: Control, ask: wire.Open) -> None:
        handler._replies.refuse_open(control.channel, ask, Overloaded("not you"))

    handler.open_session = open_session


def break_the_protocol(_scene: Scene, handler: Handler) -> None:
    def open_session(control: Control, ask: wire.Open) -> None:
        control.channel.send(wire.Attach(session=ask.session))

    handler.open_session = open_session


def say_nothing(_scene: Scene, handler: Handler) -> None:
    def open_session(control: Control, ask: wire.Open) -> None:
        pass

    handler.open_session = open_session


def die_while_it_catches_up(scene: Scene, handler: Handler) -> None:
    def take(session: HostedSession, link: DataLink, step: wire.Step) -> None:
        scene.swarm.network.kill(handler.transport.peer)

    handler._steps.take = take


def drop_it_while_it_catches_up(_scene: Scene, handler: Handler) -> None:
    def take(session: HostedSession, link: DataLink, step: wire.Step) -> None:
        session.end("not you")

    handler._steps.take = take


def refuse_what_it_is_sent(_scene: Scene, handler: Handler) -> None:
    def take(session: HostedSession, link: DataLink, step: wire.Step) -> None:
        handler._replies.refuse_step(session, step, Overloaded("not that"))

    handler._steps.take = take


def be_out_of_reach_for_those_before(scene: Scene, handler: Handler) -> None:
    before = [scene.swarm.network.transport(name).peer for name in ("a0", "b0")]
    scene.swarm.network.partition(before, [handler.transport.peer])


@pytest.mark.parametrize(
    "fail",
    [
        refuse, break_the_protocol, say_nothing, die_while_it_catches_up, drop_it_while_it_catches_up,
        refuse_what_it_is_sent, be_out_of_reach_for_those_before,
    ],
)  # fmt: skip
def test_where_the_best_will_not_stand_by_for_a_server_that_drains_another_does(
    fail: Callable[[Scene, Handler], None],
) -> None:
    async def story(scene: Scene, session: Session) -> None:
        before = await scene.write(session, 20)
        leaving = scene.in_use(session)[1]
        fail(scene, scene.swarm.handlers["b1" if leaving == "a1" else "a1"])
        far = await scene.swarm.serve("far", "3:6")
        for peer in list(scene.swarm.network.living):
            if peer != far.transport.peer:
                scene.swarm.network.set_conditions(peer, far.transport.peer, LinkConditions(0.05))
        await session._router.refresh()
        leave, began = asyncio.create_task(scene.swarm.leave(leaving)), loop_time()
        while far.transport.peer not in {hop.peer_id for hop in session.route}:
            assert max(await scene.write(session, 1)) < 3 * max(before)
            await asyncio.sleep(0.5)
        assert loop_time() - began < 30
        await leave

    play(story, "0:3", "3:6")


def test_the_only_other_server_is_asked_again_when_it_would_not_stand_by_at_first() -> None:
    async def story(scene: Scene, session: Session) -> None:
        before = await scene.write(session, 20)
        leaving = scene.in_use(session)[1]
        other = scene.swarm.handlers["b1" if leaving == "a1" else "a1"]
        willing = other.open_session
        refuse(scene, other)
        leave, began = asyncio.create_task(scene.swarm.leave(leaving)), loop_time()
        while leaving in scene.in_use(session):
            assert max(await scene.write(session, 1)) < 3 * max(before)
            await asyncio.sleep(0.5)
            if loop_time() - began > 5:
                other.open_session = willing
        assert loop_time() - began < 30
        await leave

    play(story, "0:3", "3:6")
