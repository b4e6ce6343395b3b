"""Servers that cannot reach each other any more, while the client reaches both: it stands in between.

A prompt goes round in several chunks, of which only the last wants something back. Meanwhile a link swallows what is
pushed on it, a server freezes, or both.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client import steps
from corolla.client.config import ClientConfig
from corolla.client.session import Session, StepInput
from corolla.clock import loop_time
from corolla.ids import PeerId
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.wire.messages import Want
from corolla.wire.tensors import WireTensor

NUM_BLOCKS = 6
SPANS = {"a": "0:2", "b": "2:4", "c": "4:6"}
CHUNKS = (3, 1, 4, 2)
LATENCY_S = 0.01
CONFIG = ClientConfig(wait_for_servers_s=60.0, step_timeout_s=60.0)
LIMIT_S = 300.0

Trouble = Callable[[MemorySwarm], Awaitable[None]]

every_want = pytest.mark.parametrize("want", ["last", "all"])
every_victim = pytest.mark.parametrize("victim", list(SPANS))
any_moment = pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.04, 0.06, 0.08])


def peer(swarm: MemorySwarm, name: str) -> PeerId:
    return swarm.network.transport(name).peer


def cut(swarm: MemorySwarm, one: str, other: str) -> None:
    swarm.network.partition([peer(swarm, one)], [peer(swarm, other)])


async def write(session: Session, history: list[int], want: Want, rng: random.Random) -> None:
    """A prompt in several chunks, and what comes back compared."""
    chunks = [[rng.getrandbits(32) for _ in range(size)] for size in CHUNKS]
    outputs = await session.run([StepInput(hidden_of([chunk]), len(chunk)) for chunk in chunks], want=want)
    for chunk in chunks:
        history += chunk
    right = whole_model(NUM_BLOCKS, history)
    assert numbers_in(outputs) == (right[-1:] if want == "last" else right[-sum(CHUNKS) :])


def numbers_in(outputs: list[WireTensor | None]) -> list[int]:
    return [number for output in outputs if output is not None for number in numbers_of(output)]


def live_through(trouble: Trouble, want: Want, *, substitute_for: str) -> float:
    """Three prompts, the trouble beside the second; the seconds which that one took."""

    async def scenario() -> float:
        rng, history = random.Random(1), list[int]()
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(LATENCY_S)) as swarm:
            for name, span in SPANS.items():
                await swarm.serve(name, span)
            client = await swarm.client("client", CONFIG)
            async with client.open_session(swarm.model, max_tokens=100) as session:
                await write(session, history, want, rng)
                await swarm.serve("substitute", SPANS[substitute_for])
                began = loop_time()
                await asyncio.gather(trouble(swarm), write(session, history, want, rng))
                seconds = loop_time() - began
                await write(session, history, want, rng)
                return seconds

    return run_virtual(scenario(), limit_s=LIMIT_S)


@every_want
@pytest.mark.parametrize("link", ["ab", "bc"])
@any_moment
def test_a_link_that_swallows_steps_of_a_prompt_goes_through_the_client(want: Want, link: str, delay_s: float) -> None:
    async def cut_link(swarm: MemorySwarm) -> None:
        await asyncio.sleep(delay_s)
        cut(swarm, *link)

    assert live_through(cut_link, want, substitute_for="a") < 10


@every_want
@every_victim
@any_moment
def test_a_server_that_freezes_in_a_prompt_is_replaced(want: Want, victim: str, delay_s: float) -> None:
    """Its silence looks like a link that swallows steps, until it is found dead."""

    async def freeze(swarm: MemorySwarm) -> None:
        await asyncio.sleep(delay_s)
        swarm.network.freeze(peer(swarm, victim))

    assert live_through(freeze, want, substitute_for=victim) < 10


@every_want
@every_victim
@pytest.mark.parametrize("pause_s", [1.0, 3.0, 5.9])
def test_a_server_is_lost_while_a_link_swallows_the_prompt(want: Want, victim: str, pause_s: float) -> None:
    """By the time it is found dead, the client may stand between all servers: each must give every position."""

    async def cut_and_freeze(swarm: MemorySwarm) -> None:
        cut(swarm, "b", "c")
        await asyncio.sleep(pause_s)
        swarm.network.freeze(peer(swarm, victim))

    live_through(cut_and_freeze, want, substitute_for=victim)


@pytest.mark.parametrize("delay_s", [0.02 * number for number in range(1, 16)])
def test_a_rebuild_through_the_client_may_itself_be_interrupted(delay_s: float) -> None:
    """What the client had passed on by then is a beginning only: it must not be taken for the whole history."""

    async def scenario() -> None:
        rng, history = random.Random(1), list[int]()
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(LATENCY_S)) as swarm:
            for name, span in SPANS.items():
                await swarm.serve(name, span)
            client = await swarm.client("client", CONFIG)
            async with client.open_session(swarm.model, max_tokens=100) as session:
                await write(session, history, "last", rng)
                cut(swarm, "b", "c")
                await write(session, history, "last", rng)  # from now on through the client, which kept nothing so far
                for name, span in SPANS.items():
                    await swarm.serve(f"another {name}", span)
                swarm.network.kill(peer(swarm, "c"))
                writing = asyncio.create_task(write(session, history, "last", rng))
                await asyncio.sleep(delay_s)
                swarm.network.kill(peer(swarm, "a"))
                await writing
                await write(session, history, "all", rng)

    run_virtual(scenario(), limit_s=LIMIT_S)


def test_a_slow_link_between_servers_is_not_taken_for_one_that_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are under way for longer than a dead server's silence: nothing is sent twice, and nothing parted."""
    monkeypatch.setattr(steps, "SLOWEST_LINK", 600)
    chunks = [[number] * 1500 for number in range(2)]
    slow = LinkConditions(LATENCY_S, bytes_per_s=800)

    async def scenario() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(LATENCY_S)) as swarm:
            for name, span in SPANS.items():
                await swarm.serve(name, span)
            client = await swarm.client("client", CONFIG)
            async with client.open_session(swarm.model, max_tokens=3100) as session:
                await session.step(hidden_of([[7]]), num_tokens=1, want="last")
                swarm.network.set_conditions(peer(swarm, "a"), peer(swarm, "b"), slow)
                began = loop_time()
                inputs = [StepInput(hidden_of([chunk]), len(chunk)) for chunk in chunks]
                outputs = await session.run(inputs, want="last")
                assert loop_time() - began > 2 * CONFIG.liveness.dead_after_s, "slow enough to be mistaken"
                assert numbers_in(outputs) == whole_model(NUM_BLOCKS, [7, *itertools.chain(*chunks)])[-1:]
                assert session.recoveries == 0
                assert session.through_client == []

    run_virtual(scenario(), limit_s=LIMIT_S)
