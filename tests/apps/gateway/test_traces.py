"""Where the time of an answer went: every second is somebody's, and memory stays bounded."""

from itertools import pairwise

import pytest

from corolla.apps.gateway.traced_route import describe_route
from corolla.apps.gateway.traces import (
    FIRST_STEPS,
    LATEST_STEPS,
    MAX_ROUTES,
    AnswerTrace,
    StepTrace,
    TracedHop,
    TracedRoute,
    TraceStore,
)
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of
from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.swarm.cost import CostModel
from corolla.wire.messages import HopTiming

TWO_HOPS = TracedRoute(
    (TracedHop(PeerId("a"), "attic", 0, 4), TracedHop(PeerId("b"), "cellar", 4, 8)), (0.01, 0.02, 0.01), 0.1
)
TIMES = (HopTiming(0.001, 0.02, 0.003), HopTiming(0.002, 0.03, 0.004))
SENDS_S = 0.007


def begun(route: TracedRoute = TWO_HOPS) -> AnswerTrace:
    trace = TraceStore().begin(model="tiny", now=1000.0)
    trace.took_route(route)
    return trace


def seconds_of(step: StepTrace) -> list[float]:
    hops = (s for h in step.hops for s in (h.queue_s, h.compute_s, h.send_s, h.wire_s))
    return [s or 0.0 for s in (step.local_s, step.return_s, step.rest_s, *hops)]


def test_every_second_of_a_step_is_somebodys() -> None:
    trace = begun()
    for _ in range(2):
        trace.saw_step("decode", tokens=1, total_s=0.12, local_s=0.007, chunks=[TIMES])
    for step in trace.steps:
        assert sum(seconds_of(step)) == pytest.approx(step.total_s)


def test_sending_is_told_by_the_step_after_it_and_of_the_last_one_nobody_tells() -> None:
    trace = begun()
    for _ in range(3):
        trace.saw_step("decode", tokens=1, total_s=0.12, local_s=0.0, chunks=[TIMES])
    assert [[hop.send_s for hop in step.hops] for step in trace.steps] == [[0.003, 0.004]] * 2 + [[None, None]]
    first, _, last = trace.steps
    assert last.rest_s - first.rest_s == pytest.approx(SENDS_S)


def test_after_a_recovery_nobody_tells_of_the_step_before_it() -> None:
    trace = begun()
    trace.saw_step("decode", tokens=1, total_s=0.12, local_s=0.0, chunks=[TIMES])
    trace.took_route(TWO_HOPS)  # the same servers, of which one was given everything anew
    trace.saw_step("decode", tokens=1, total_s=0.12, local_s=0.0, chunks=[TIMES])
    assert [hop.send_s for hop in trace.steps[0].hops] == [None, None]


def test_links_are_given_their_measured_half_round_trip_and_the_rest_is_nobodys() -> None:
    trace = begun()
    trace.saw_step("decode", tokens=1, total_s=0.103, local_s=0.0, chunks=[TIMES])
    [step] = trace.steps
    assert [hop.wire_s for hop in step.hops] + [step.return_s] == pytest.approx([0.01, 0.02, 0.01])
    assert step.rest_s == pytest.approx(0.01)


def test_links_that_were_faster_than_measured_share_what_was_spent() -> None:
    trace = begun()
    trace.saw_step("decode", tokens=1, total_s=0.073, local_s=0.0, chunks=[TIMES])
    [step] = trace.steps
    assert [hop.wire_s for hop in step.hops] + [step.return_s] == pytest.approx([0.005, 0.01, 0.005])
    assert step.rest_s == pytest.approx(0.0)


@pytest.mark.parametrize("links_s", [(), (0.01, None, 0.01)])
def test_a_link_that_nobody_measured_is_given_nothing(links_s: tuple[float | None, ...]) -> None:
    trace = begun(TracedRoute(TWO_HOPS.hops, links_s))
    trace.saw_step("decode", tokens=1, total_s=0.083, local_s=0.0, chunks=[TIMES])
    [step] = trace.steps
    assert [hop.wire_s for hop in step.hops] + [step.return_s] == pytest.approx(list(links_s) or [None] * 3)
    assert step.rest_s == pytest.approx(0.03 - sum(link_s or 0.0 for link_s in links_s))


def test_a_step_that_lost_its_timings_blames_nobody() -> None:
    trace = begun()
    trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.02, chunks=[TIMES[:1]])
    [step] = trace.steps
    assert step.hops == ()
    assert step.rest_s == pytest.approx(0.08)


def test_clocks_that_disagree_never_make_travel_negative() -> None:
    trace = begun()
    trace.saw_step("decode", tokens=1, total_s=0.01, local_s=0.0, chunks=[TIMES])
    assert all(hop.wire_s == 0 for hop in trace.steps[0].hops)


def test_speed_is_that_of_the_decode_steps() -> None:
    trace = begun()
    trace.saw_step("prefill", tokens=40, total_s=2.0, local_s=0.1, chunks=[TIMES])
    assert trace.tokens_per_s is None
    for _ in range(10):
        trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.01, chunks=[TIMES])
    assert trace.tokens_per_s == pytest.approx(10.0)
    assert trace.answered_tokens == 11
    assert trace.first_token_s == pytest.approx(2.0)


def test_a_long_answer_keeps_its_beginning_and_its_end() -> None:
    trace = begun()
    for number in range(2000):
        trace.saw_step("decode", tokens=number, total_s=0.1, local_s=0.01, chunks=[TIMES])
    kept = [step.tokens for step in trace.steps]
    assert kept == [*range(FIRST_STEPS), *range(2000 - LATEST_STEPS, 2000)]
    assert trace.num_steps == 2000
    assert trace.steps[-1].started_s == pytest.approx(199.9)


def test_steps_know_the_route_they_took() -> None:
    trace = begun()
    other = TracedRoute((TracedHop(PeerId("c"), "", 0, 8),), ())
    for route in (TWO_HOPS, other, TWO_HOPS):
        trace.took_route(route)
        trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.0, chunks=[()])
    assert [step.route for step in trace.steps] == [0, 1, 0]
    for number in range(100):
        trace.took_route(TracedRoute((TracedHop(PeerId(f"p{number}"), "", 0, 8),), ()))
    assert len(trace.routes) == MAX_ROUTES
    assert trace.route is not None
    assert trace.route.hops[0].peer == "p99"


def test_chunks_of_a_prompt_are_added_up_hop_by_hop() -> None:
    trace = begun()
    trace.saw_step("prefill", tokens=900, total_s=0.2, local_s=0.0, chunks=[TIMES] * 3)
    trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.0, chunks=[TIMES])
    prefill = trace.steps[0]
    assert prefill.chunks == 3
    assert [hop.compute_s for hop in prefill.hops] == pytest.approx([0.06, 0.09])
    assert [hop.send_s for hop in prefill.hops] == pytest.approx([0.009, 0.012])
    trace.saw_step("prefill", tokens=900, total_s=0.2, local_s=0.0, chunks=[TIMES, TIMES[:1]])
    assert trace.steps[-1].hops == ()


def test_only_the_latest_answers_are_kept_newest_first() -> None:
    store = TraceStore(max_traces=3)
    begun = [store.begin(model="tiny", now=float(number)) for number in range(5)]
    assert store.latest() == begun[:1:-1]
    assert store.latest(count=1) == begun[4:]
    assert store.find(begun[0].id) is None
    assert store.find(begun[4].id) is begun[4]


def test_an_answer_is_shown_to_its_owner_only() -> None:
    store = TraceStore()
    mine, yours = store.begin(model="tiny", owner="me", now=0.0), store.begin(model="tiny", owner="you", now=0.0)
    assert store.latest("me") == [mine]
    assert store.find(yours.id, "me") is None


def test_a_route_is_described_with_names_delays_and_the_runner_up() -> None:
    async def look() -> tuple[TracedRoute, TracedRoute | None]:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:4")
            await swarm.serve("cellar", "4:8")
            await swarm.serve("whole", "0:8")
            client = await swarm.client("me")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                await session.step(hidden_of([[1, 2]]), num_tokens=2, want="last")
                assert len(session.chunk_timings) == 1
                assert session.chunk_timings[-1] == session.timings
                router = client.router(swarm.model)
                return describe_route(router, session.route, CostModel(), tokens_needed=64)

    used, runner_up = run_virtual(look())
    assert runner_up is not None
    for route in (used, runner_up):
        assert {hop.name for hop in route.hops} <= {"attic", "cellar", "whole"}
        assert (route.hops[0].start, route.hops[-1].end) == (0, 8)
        assert all(before.end == after.start for before, after in pairwise(route.hops))
        assert len(route.links_s) == len(route.hops) + 1
    assert used.hops != runner_up.hops
