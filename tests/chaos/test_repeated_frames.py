"""Steps and outputs that come twice, or once more much later, change nothing: everything is counted by `step_no`."""

import pytest

from corolla.apps.sim.chaos import LIVES_PER_REPEATED, live

SEEDS = range(10_000, 10_000 + 30 * LIVES_PER_REPEATED, LIVES_PER_REPEATED)


@pytest.mark.full
def test_steps_and_outputs_that_come_again_change_nothing() -> None:
    lives = [live(seed) for seed in SEEDS]
    assert sum(life.steps for life in lives) > 5 * len(lives)
    assert sum(life.repeats for life in lives) > sum(life.steps for life in lives)


def test_other_lives_have_none() -> None:
    assert live(SEEDS.start + 1).repeats == 0
