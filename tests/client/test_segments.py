"""What is replayed through the client goes on once and in order, whatever the servers send."""

import pytest
from msgspec.structs import replace

from corolla.apps.sim.toy import hidden_of
from corolla.client.recovery import Place, mark_fresh
from corolla.client.segments import Segments
from corolla.client.steps import StepInput, Steps
from corolla.ids import PeerId
from corolla.wire.messages import Output, Step

BORDER = 2
PLACES = [Place(PeerId("A"), 0, BORDER), Place(PeerId("B"), BORDER, 4)]
NUM_STEPS = 4


def given_back(step: Step) -> Output:
    return Output(step_no=step.step_no, position=step.position + 1, replay=True, hidden=step.hidden)


@pytest.fixture
def replayed() -> tuple[Segments, list[Output]]:
    """A border that has no history is refed; and what the servers before it give back."""
    steps = Steps(max_tokens=100, max_rows=1)
    segments = Segments(steps, exact=False)
    for number in range(NUM_STEPS):
        steps.begin([StepInput(hidden_of([[number]]), 1)], "last", None)
        [pending] = steps.pending.values()
        segments.keep(pending.step, 0)
        pending.is_pushed, pending.output = True, given_back(pending.step)
        steps.commit()
    segments.part_at(BORDER, PLACES, on_suspicion=False)
    segments.begin_refeeding(mark_fresh(PLACES, [0, 1]), last_answered=NUM_STEPS - 1)
    replay = segments.begin_replay([replace(step, replay=True) for step in segments.heads[0].recent(0)])
    assert [step.want for step in replay] == ["all"] * NUM_STEPS
    return segments, [given_back(step) for step in replay]


def test_in_order_each_goes_on_and_becomes_the_borders_history(replayed: tuple[Segments, list[Output]]) -> None:
    segments, outputs = replayed
    for output in outputs:
        assert segments.flaw_of_replayed(output, 0) is None
        passed_on = segments.passed_on(output, 0, route_version=1)
        assert passed_on is not None
        head, step = passed_on
        assert (head, step.step_no, step.replay, step.want) == (BORDER, output.step_no, True, "none")
    assert segments.heads[BORDER].covers(NUM_STEPS - 1)


def test_one_that_comes_again_is_not_taken_for_more_history(replayed: tuple[Segments, list[Output]]) -> None:
    segments, outputs = replayed
    for output in outputs:
        for repeated in outputs[: output.step_no + 1]:
            assert segments.flaw_of_replayed(repeated, 0) is None
            assert (segments.passed_on(repeated, 0, route_version=1) is None) == (repeated is not output)
    assert segments.heads[BORDER].history_end + len(segments.heads[BORDER].recent(0)) == NUM_STEPS


def test_one_that_comes_before_its_time_is_its_servers_fault(replayed: tuple[Segments, list[Output]]) -> None:
    segments, outputs = replayed
    segments.passed_on(outputs[0], 0, route_version=1)
    flaw = segments.flaw_of_replayed(outputs[2], 0)
    assert flaw == "its output of a replay of step 2 comes before others that precede it"
    assert segments.passed_on(outputs[2], 0, route_version=1) is None
