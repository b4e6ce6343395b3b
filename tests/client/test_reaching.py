"""Dead servers that are still announced do not hold a recovery up: the next best are dialled beside them."""

import asyncio

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.outcomes import PlacesFailed
from corolla.client.reaching import HEAD_START_S, MAX_DIALS, first_to_answer
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.errors import BadInput, HopFailed
from corolla.ids import PeerId
from corolla.net.liveness import Liveness
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.swarm.route import Route, RouteHop

NUM_BLOCKS = 4
DIAL_TIMEOUT_S = 5.0
A, B, C = (PeerId(name) for name in "ABC")


def route(*peers: str) -> Route:
    return Route(tuple(RouteHop(PeerId(peer), block, block + 1) for block, peer in enumerate(peers)), 1.0)


class Dialled:
    """Servers that answer after so long, or not at all."""

    def __init__(self, **answers_s: float | Exception) -> None:
        self.answers_s = answers_s
        self.order = list[str]()
        self.running = 0
        self.most = 0

    async def __call__(self, peer: PeerId) -> None:
        self.order.append(peer)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.answers_s.get(peer, DIAL_TIMEOUT_S)
            if isinstance(answer, Exception):
                raise answer
            await asyncio.sleep(answer)
            if answer == DIAL_TIMEOUT_S:
                raise HopFailed(peer, "no answer to a dial")
        finally:
            self.running -= 1


def race(dialled: Dialled, routes: list[Route]) -> tuple[Route, float]:
    """Which route won, and when."""

    async def told() -> tuple[Route, float]:
        def next_best(unanswered: frozenset[PeerId]) -> Route | None:
            return next((r for r in routes if unanswered.isdisjoint(hop.peer for hop in r.hops)), None)

        won = await first_to_answer(routes[0], next_best, dialled, {A: 0.0, B: 0.0, C: 0.0})
        assert dialled.running == 0, "nobody is dialled for a race that is over"
        return won, loop_time()

    return run_virtual(told())


def test_the_best_that_answers_in_time_is_taken_and_nobody_else_is_bothered() -> None:
    dialled = Dialled(A=0.1, B=0.15)
    assert race(dialled, [route("A", "B"), route("C")]) == (route("A", "B"), pytest.approx(0.15))
    assert dialled.order == ["A", "B"]


def test_a_slow_one_loses_against_the_next_best_and_a_part_that_answers_is_used_again() -> None:
    dialled = Dialled(A=0.01, C=0.05)
    expected = (route("A", "C"), pytest.approx(HEAD_START_S + 0.05))
    assert race(dialled, [route("A", "B"), route("A", "C")]) == expected
    assert dialled.order == ["A", "B", "C"]


@pytest.mark.parametrize("early_s", [0.0, 5e-10, 1e-9, 2e-9])
def test_an_answer_in_the_very_moment_in_which_patience_ends_counts(early_s: float) -> None:
    won, _ = race(Dialled(A=HEAD_START_S - early_s), [route("A")])
    assert won == route("A")


def test_after_a_refusal_the_next_best_is_dialled_at_once() -> None:
    dialled = Dialled(A=HopFailed(A, "refused"), B=0.05)
    assert race(dialled, [route("A"), route("B")]) == (route("B"), pytest.approx(0.05))


def test_no_more_than_so_many_are_dialled_at_once_and_who_answers_last_is_found_in_the_end() -> None:
    dead = [route(f"dead{number}") for number in range(3 * MAX_DIALS)]
    dialled = Dialled(C=0.05)
    won, at = race(dialled, [*dead, route("C")])
    assert won == route("C")
    assert at < 4 * DIAL_TIMEOUT_S
    assert dialled.most == MAX_DIALS


def test_when_nobody_answers_each_failure_is_told_with_the_blocks_of_the_best() -> None:
    with pytest.raises(PlacesFailed) as failed:
        race(Dialled(A=0.1), [route("A", "B"), route("A", "C")])
    assert set(failed.value.errors) == {B, C}
    assert list(failed.value.blocks) == [1]


def test_our_own_mistake_is_raised_as_it_is() -> None:
    with pytest.raises(BadInput):
        race(Dialled(A=BadInput("ours")), [route("A"), route("B")])


@pytest.mark.parametrize("num_dead", [1, 3])
def test_a_frozen_server_is_replaced_in_time_though_dead_ones_are_announced_ahead_of_a_live_one(num_dead: int) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.005)) as swarm:
            await swarm.serve("first", "0:2")
            near = [(await swarm.serve(f"near{n}", "2:4")).transport.peer for n in range(1 + num_dead)]
            live = (await swarm.serve("live", "2:4")).transport.peer
            client = await swarm.client("client")
            for peer in swarm.network.living:  # so it is the last that a route would choose
                swarm.network.set_conditions(peer, live, LinkConditions(0.02))
            await client.router(swarm.model).refresh()
            await asyncio.sleep(3)  # round trips are measured
            async with client.open_session(swarm.model, max_tokens=64) as session:
                await write(session, [1])
                assert session.route[1].peer_id in near
                for peer in near:
                    swarm.network.freeze(peer)
                began = loop_time()
                await write(session, [1, 2])
                assert loop_time() - began < Liveness().dead_after_s + 1
                assert session.route[1].peer_id == live
            await asyncio.sleep(2 * DIAL_TIMEOUT_S)
            assert set(near) <= client.router(swarm.model).book.banned(loop_time() - 12).keys()
            for handler in swarm.handlers.values():
                assert not handler.sessions or handler.transport.peer in near

    run_virtual(told(), limit_s=1000)


async def write(session: Session, written: list[int]) -> None:
    output = await session.step(hidden_of([written[-1:]]), num_tokens=1, want="last")
    assert output is not None
    assert numbers_of(output) == whole_model(NUM_BLOCKS, written)[-1:]
