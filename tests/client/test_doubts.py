"""Two servers that cannot reach each other may try again later, ever more seldom."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.doubts import (
    FIRST_PAUSE_S,
    FORGOTTEN_AFTER_S,
    LONGEST_PAUSE_S,
    after_fault,
    after_parting,
    is_remembered,
    may_try,
)
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual

NUM_BLOCKS = 4
STEP_S = 0.04
"""Once round the ring, and through the client in between."""


def test_a_link_that_failed_once_long_ago_is_not_doubted() -> None:
    doubt = after_fault(10.0)
    assert is_remembered(doubt, 10.0 + FORGOTTEN_AFTER_S - 1)
    assert not is_remembered(doubt, 10.0 + FORGOTTEN_AFTER_S)
    assert not is_remembered(None, 0.0)


def test_each_vain_try_doubles_the_pause_up_to_a_bound_and_a_long_peace_forgets_it() -> None:
    now, pauses, doubt = 0.0, list[float](), after_fault(0.0)
    for _ in range(8):
        doubt = after_parting(doubt, now)
        assert not may_try(doubt, now + doubt.pause_s - 1)
        assert may_try(doubt, now + doubt.pause_s)
        pauses.append(doubt.pause_s)
        now += doubt.pause_s + 1
    assert pauses[:3] == [FIRST_PAUSE_S * 2**n for n in range(3)]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert after_parting(doubt, doubt.forgotten_at).pause_s == FIRST_PAUSE_S


class Parted:
    """A session whose two servers cannot reach each other, and what goes over the link between them."""

    def __init__(self, swarm: MemorySwarm, session: Session) -> None:
        self.swarm, self.session = swarm, session
        self.history = list[int]()
        self.peers = [swarm.network.transport(name).peer for name in "ab"]

    async def write(self) -> float:
        """One step, its output compared; the seconds it took."""
        began = loop_time()
        self.history.append(len(self.history))
        output = await self.session.step(hidden_of([self.history[-1:]]), num_tokens=1, want="last")
        assert output is not None
        assert numbers_of(output) == whole_model(NUM_BLOCKS, self.history)[-1:]
        return loop_time() - began

    async def write_for(self, seconds: float) -> list[float]:
        """A step now and then; when those were that took long, from now on."""
        began, slow = loop_time(), list[float]()
        while loop_time() < began + seconds:
            at = loop_time() - began
            if await self.write() > 2 * STEP_S:
                slow.append(at)
            await asyncio.sleep(1)
        return slow

    @property
    def goes_through_us(self) -> bool:
        return self.session.through_client == [2]


def tell(story: Callable[[Parted], Awaitable[None]]) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.01)) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=4000) as session:
                parted = Parted(swarm, session)
                await parted.write()
                swarm.network.partition(parted.peers[:1], parted.peers[1:])
                await parted.write()
                assert parted.goes_through_us
                await story(parted)

    run_virtual(told(), limit_s=2000)


def test_a_link_that_is_mended_carries_steps_again_after_a_while() -> None:
    async def story(parted: Parted) -> None:
        parted.swarm.network.heal(parted.peers[:1], parted.peers[1:])
        await parted.write_for(FIRST_PAUSE_S + 1)
        assert not parted.goes_through_us
        assert await parted.write() == pytest.approx(0.03, abs=0.001), "one way to each, and back"
        parted.swarm.network.kill(parted.peers[1])
        await parted.swarm.serve("b2", "2:4")
        await parted.write()  # what had gone through the client is not in the journal of the one before
        assert not parted.goes_through_us

    tell(story)


def test_a_link_that_stays_cut_is_tried_ever_more_seldom_and_no_text_is_lost() -> None:
    async def story(parted: Parted) -> None:
        slow = await parted.write_for(4 * FIRST_PAUSE_S)
        assert parted.goes_through_us
        assert slow == pytest.approx([FIRST_PAUSE_S, 3 * FIRST_PAUSE_S], abs=10)

    tell(story)


def test_a_substitute_is_reached_by_the_server_before_it_though_the_lost_one_was_not() -> None:
    async def story(parted: Parted) -> None:
        parted.swarm.network.kill(parted.peers[1])
        await parted.swarm.serve("b2", "2:4")
        await parted.write()
        await parted.write()
        assert not parted.goes_through_us

    tell(story)
