"""When a hop counts as slow: much slower than it was, for some steps on end, and not together with the others."""

from collections.abc import Iterable
from itertools import pairwise

from corolla.client.slowness import (
    LEAST_LOSS_S,
    LONGEST_PAUSE_S,
    STEPS_TO_BELIEVE,
    STEPS_TO_KNOW,
    Pace,
    Patience,
    after_look,
    after_step,
    is_worth,
    pick_slow,
)

KNOWN = [0.02] * (STEPS_TO_KNOW + STEPS_TO_BELIEVE)
SLOW = [0.4] * STEPS_TO_BELIEVE


def pace_of(steps_s: Iterable[float]) -> Pace:
    pace: Pace | None = None
    for step_s in steps_s:
        pace = after_step(pace, step_s)
    assert pace is not None
    return pace


def test_a_hop_that_takes_twenty_times_as_long_is_found() -> None:
    assert pick_slow([pace_of(KNOWN), pace_of(KNOWN + SLOW), pace_of(KNOWN)]) == 1
    assert pick_slow([pace_of(KNOWN + SLOW)]) == 0


def test_some_slow_steps_among_quick_ones_are_jitter() -> None:
    jitter = KNOWN + [*SLOW[:-1], 0.02] * 10
    assert pick_slow([pace_of(jitter)]) is None


def test_slowness_that_all_share_is_nobodys() -> None:
    assert pick_slow([pace_of(KNOWN + SLOW)] * 3) is None
    assert pick_slow([pace_of(KNOWN + SLOW), pace_of(KNOWN + [0.3] * STEPS_TO_BELIEVE)]) is None


def test_nothing_is_usual_before_some_steps() -> None:
    assert pick_slow([pace_of([0.02] + [2.0] * STEPS_TO_BELIEVE)]) is None
    assert pick_slow([]) is None


def test_a_server_that_was_always_slow_is_no_slower_than_it_was() -> None:
    assert pick_slow([pace_of([2.0] * 50)]) is None


def test_time_that_nobody_would_notice_does_not_count() -> None:
    usual = [0.0001] * len(KNOWN)
    assert pick_slow([pace_of(usual + [LEAST_LOSS_S / 2] * STEPS_TO_BELIEVE)]) is None


def test_a_text_that_grows_makes_no_hop_slow() -> None:
    assert all(pick_slow([pace_of(0.02 + 0.002 * step for step in range(length))]) is None for length in range(1, 500))


def test_slow_steps_do_not_become_usual() -> None:
    assert pick_slow([pace_of(KNOWN + SLOW * 50)]) == 0


def test_a_server_is_left_only_for_one_that_costs_half() -> None:
    assert is_worth(present_s=0.4, other_s=0.2)
    assert not is_worth(present_s=0.4, other_s=0.21)


def test_each_look_for_something_better_comes_later_than_the_one_before() -> None:
    patience, looks = Patience(), [0.0]
    while looks[-1] < 3600:
        patience = after_look(patience, looks[-1])
        looks.append(patience.until)
    pauses = [after - before for before, after in pairwise(looks)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert len(looks) < 12, "in an hour"
