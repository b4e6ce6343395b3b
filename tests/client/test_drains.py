"""A server leaves where nobody is quite its like, or more goes wrong meanwhile: no step fails, and the text goes on.

The plain case, and who stands by in its stead, are in `test_moving.py`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from corolla.apps.sim.paced import Pace, PacedSpan
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.hop import Hop
from corolla.client.session import Session
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import MissingBlocks, SessionLost, SwarmError
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.handler import Handler
from corolla.wire import messages as wire

NUM_BLOCKS = 6
NEAR, FAR = LinkConditions(0.002), LinkConditions(0.05)
DRAIN_S = 60.0
"""The servers' default."""
QUICK_S = 0.5
"""No step here takes so long, with a recovery before it."""
ITS_LAST_S = 12.0
"""Within so much of its end a server is left by a recovery, and not before."""


@dataclass(slots=True)
class Scene:
    """A session that writes on a swarm in memory; what went wrong with steps under way is noted."""

    swarm: MemorySwarm
    client: Swarm
    session: Session
    written: list[int] = field(default_factory=list[int])
    faults: list[SwarmError] = field(default_factory=list[SwarmError])
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def peer(self, name: str) -> PeerId:
        return self.swarm.handlers[name].transport.peer

    @property
    def in_use(self) -> list[str]:
        peers = {handler.transport.peer: name for name, handler in self.swarm.handlers.items()}
        return [peers[hop.peer_id] for hop in self.session.route]

    @property
    def banned(self) -> dict[PeerId, float]:
        return self.client.router(self.swarm.model).book.banned(loop_time())

    async def write(self, num_tokens: int = 1) -> float:
        """So many single steps, each output compared; the longest, in seconds."""
        longest_s = 0.0
        for _ in range(num_tokens):
            self.written.append(self.rng.getrandbits(32))
            began = loop_time()
            output = await self.session.step(hidden_of([self.written[-1:]]), num_tokens=1, want="last")
            longest_s = max(longest_s, loop_time() - began)
            assert output is not None
            assert numbers_of(output) == whole_model(NUM_BLOCKS, self.written)[-1:]
        return longest_s

    async def write_until(self, is_over: Callable[[], bool], *, within_s: float) -> float:
        """A step each half second; seconds until it was over. No step takes long, or fails."""
        began = loop_time()
        while not is_over():
            assert await self.write() < QUICK_S
            await asyncio.sleep(0.5)
            assert loop_time() - began < within_s
        assert self.faults == []
        return loop_time() - began

    def leave(self, name: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self.swarm.leave(name))


def play(story: Callable[[Scene], Awaitable[None]], *servers: tuple[str, str]) -> None:
    """A session over the first of these servers (name, span) that cover the model; the others come later."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=NEAR) as swarm:
            for name, span in servers:
                await swarm.serve(name, span)
            client = await swarm.client("client", ClientConfig(wait_for_servers_s=5.0))
            async with client.open_session(swarm.model, max_tokens=1000) as session:
                scene = Scene(swarm, client, session)
                mend = session._mender.on_fault

                def on_fault(hop: Hop, error: SwarmError) -> None:
                    scene.faults.append(error)
                    mend(hop, error)

                session._mender.on_fault = on_fault
                await scene.write(10)
                await story(scene)

    run_virtual(told(), limit_s=10_000)


THREE = (("head", "0:2"), ("leaving", "2:4"), ("tail", "4:6"))


async def serve_far(scene: Scene, name: str, span: str) -> None:
    handler = await scene.swarm.serve(name, span)
    for peer in list(scene.swarm.network.living):
        if peer != handler.transport.peer:
            scene.swarm.network.set_conditions(peer, handler.transport.peer, FAR)


async def look_again(scene: Scene) -> None:
    await scene.client.router(scene.swarm.model).refresh()
    await asyncio.sleep(1)  # round trips are measured


# --- who takes the place


def test_one_server_stands_by_though_a_chain_of_two_would_cost_less() -> None:
    async def story(scene: Scene) -> None:
        for name, span in (("left", "2:3"), ("right", "3:4")):
            await scene.swarm.serve(name, span)
        await serve_far(scene, "far", "1:5")
        await look_again(scene)
        router, in_use = scene.client.router(scene.swarm.model), frozenset(hop.peer_id for hop in scene.session.route)
        assert len(router.find_part(range(2, 4), tokens_needed=100, without=in_use).hops) == 2
        left = scene.leave("leaving")
        await scene.write_until(lambda: "leaving" not in scene.in_use, within_s=5)
        assert scene.in_use == ["head", "far", "tail"]
        assert scene.session.recoveries == 1
        await left

    play(story, *THREE)


@pytest.mark.parametrize("leaving", ["head", "leaving", "tail"])
def test_where_only_several_have_the_blocks_a_server_is_left_between_two_steps_before_it_is_gone(leaving: str) -> None:
    async def story(scene: Scene) -> None:
        start = 2 * scene.in_use.index(leaving)
        await scene.swarm.serve("left", f"{start}:{start + 1}")
        await scene.swarm.serve("right", f"{start + 1}:{start + 2}")
        await look_again(scene)
        left = scene.leave(leaving)
        took_s = await scene.write_until(lambda: leaving not in scene.in_use, within_s=DRAIN_S)
        assert took_s > DRAIN_S - ITS_LAST_S, "until then one alone might have come"
        assert {"left", "right"} < set(scene.in_use)
        assert scene.session.recoveries == 1
        assert scene.banned == {}
        await asyncio.sleep(1)
        assert left.done(), "it was told, and had nothing to wait for"

    play(story, *THREE)


def test_one_that_joins_late_stands_by_where_only_several_had_the_blocks() -> None:
    async def story(scene: Scene) -> None:
        await scene.swarm.serve("left", "2:3")
        await scene.swarm.serve("right", "3:4")
        left = scene.leave("leaving")
        for _ in range(10):
            assert await scene.write() < QUICK_S
            await asyncio.sleep(1)
        assert "leaving" in scene.in_use
        await scene.swarm.serve("one", "2:4")
        await scene.write_until(lambda: "one" in scene.in_use, within_s=5)
        assert scene.session.recoveries == 1
        await left

    play(story, *THREE)


def test_a_server_that_leaves_is_replaced_by_one_in_use_where_nobody_else_has_its_blocks() -> None:
    """That one has more blocks than it is used for: it begins anew with more of them, still between two steps."""

    async def story(scene: Scene) -> None:
        assert scene.in_use == ["leaving", "wide"]
        await scene.swarm.serve("start", "0:2")
        left = scene.leave("leaving")
        await scene.write_until(lambda: "leaving" not in scene.in_use, within_s=DRAIN_S)
        assert scene.in_use == ["start", "wide"]
        assert scene.session.recoveries == 1
        await left

    play(story, ("leaving", "0:4"), ("wide", "2:6"))


# --- history that nobody kept


def test_where_the_server_before_has_not_kept_the_history_nobody_is_made_to_stand_by_again_and_again() -> None:
    async def story(scene: Scene) -> None:
        (upstream,) = scene.swarm.handlers["head"].sessions.values()
        upstream.push.skip(5)
        await scene.write(10)
        other = await scene.swarm.serve("other", "2:4")
        await scene.swarm.serve("another head", "0:2")
        opened = count_opens(other)
        left = scene.leave("leaving")
        began = loop_time()
        took_s = await scene.write_until(lambda: len(opened) == 1 and not other.sessions, within_s=5)
        await scene.write_until(lambda: "leaving" not in scene.in_use, within_s=DRAIN_S - took_s)
        assert loop_time() - began > DRAIN_S - ITS_LAST_S
        assert [ask.standby for ask in opened if ask.route_version == 0] == [True]
        assert scene.in_use == ["head", "other", "tail"]
        assert scene.banned == {}
        await left

    play(story, *THREE)


def count_opens(handler: Handler) -> list[wire.Open]:
    opened: list[wire.Open] = []
    take = handler.open_session

    def open_session(control: object, ask: wire.Open) -> None:
        opened.append(ask)
        take(control, ask)  # pyright: ignore[reportArgumentType] - handed on as it came

    handler.open_session = open_session
    return opened


def test_a_session_that_could_not_be_rebuilt_stays_on_a_server_that_leaves_as_long_as_that_serves() -> None:
    async def story(scene: Scene) -> None:
        scene.session.give_up_journal()
        await scene.swarm.serve("left", "0:1")
        await scene.swarm.serve("right", "1:2")
        left = scene.leave("head")
        await scene.write_until(lambda: loop_time() > DRAIN_S, within_s=DRAIN_S)
        assert scene.session.recoveries == 0
        await left
        with pytest.raises(SessionLost):
            await scene.write()

    play(story, *THREE)


# --- more goes wrong


def kill(scene: Scene, name: str) -> None:
    scene.swarm.network.kill(scene.peer(name))


def freeze(scene: Scene, name: str) -> None:
    scene.swarm.network.freeze(scene.peer(name))


@pytest.mark.parametrize("struck", ["leaving", "other", "head", "tail"])
@pytest.mark.parametrize("blow", [kill, freeze])
def test_whoever_is_lost_while_one_stands_by_for_a_server_that_leaves_the_text_goes_on(
    blow: Callable[[Scene, str], None], struck: str
) -> None:
    async def story(scene: Scene) -> None:
        pace = Pace(0.2)
        await scene.swarm.serve("other", "2:4", runner=PacedSpan(2, 4, pace), executor=pace.executor)
        await scene.swarm.serve("another head", "0:2")
        await scene.swarm.serve("another tail", "4:6")
        await serve_far(scene, "another", "2:4")
        await look_again(scene)
        left = scene.leave("leaving")
        await asyncio.sleep(1)
        assert pace.executor.waiting > 1, "it is catching up"
        blow(scene, struck)
        pace.step_s = 0.01
        for _ in range(30):
            await scene.write()
            await asyncio.sleep(0.5)
        assert not {"leaving", struck} & set(scene.in_use)
        assert set(scene.banned) <= {scene.peer(struck)}
        if blow is freeze:
            scene.swarm.network.thaw(scene.peer(struck))
        await left

    play(story, *THREE)


# --- time runs out


def test_a_server_that_nobody_can_replace_serves_to_the_end_of_its_drain_and_then_ends() -> None:
    async def story(scene: Scene) -> None:
        left, began = scene.leave("leaving"), loop_time()
        while not left.done():
            assert await scene.write() < QUICK_S
            await asyncio.sleep(0.5)
        assert scene.session.recoveries == 0
        assert DRAIN_S <= loop_time() - began < DRAIN_S + 10
        with pytest.raises(MissingBlocks):
            await scene.write()

    play(story, *THREE)


def test_a_drain_that_runs_out_waits_no_longer_than_its_time_for_a_session_that_stays() -> None:
    async def story(scene: Scene) -> None:
        handler, began = scene.swarm.handlers["leaving"], loop_time()
        await handler.drain(3.0)
        assert loop_time() - began == pytest.approx(3.0)
        assert handler.sessions, "nobody could take it over, and it was not torn before the server closes"
        await scene.write()

    play(story, *THREE)
