"""One long text under a thousand kills: every number right, no step hangs.

All times are virtual and the seed decides everything, so a busy machine changes nothing but how long this takes.
"""

import pytest

from corolla.apps.sim.long_run import LongRun, live_long
from corolla.net.memory.loop import run_virtual


def assert_went_well(run: LongRun, kills: int) -> None:
    assert (run.kills, run.num_differing, run.hangs) == (kills, 0, 0)
    assert run.kills_in_use > kills / 4
    assert run.recoveries >= run.kills_in_use / 2  # two that die at once are one recovery


def test_fifty_kills_change_nothing_in_a_long_text() -> None:
    assert_went_well(run_virtual(live_long(seed=3, num_kills=50)), 50)


@pytest.mark.full
@pytest.mark.timeout(2700)
def test_a_thousand_kills_change_nothing_in_a_long_text() -> None:
    assert_went_well(run_virtual(live_long(seed=4, num_kills=1000)), 1000)
