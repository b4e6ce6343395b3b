"""What recovery decides: what a fault calls for, who is replaced, who begins afresh, and who sends what again."""

import pytest

from corolla.client.recovery import (
    Held,
    LinkRemedy,
    Place,
    Remedy,
    Resend,
    lost_runs,
    mark_fresh,
    must_rebuild,
    plan_resends,
    remedy_for,
    remedy_for_link,
    replace_lost,
)
from corolla.errors import (
    HopFailed,
    JournalGap,
    NeedsReplay,
    OutOfOrder,
    Overloaded,
    RemoteProtocolError,
    SessionLost,
    SwarmError,
    Unsupported,
)
from corolla.ids import PeerId
from corolla.swarm.route import Route, RouteHop

A, B, C, D, E = (PeerId(name) for name in "ABCDE")
PLACES = [Place(A, 0, 2), Place(B, 2, 4), Place(C, 4, 6), Place(D, 6, 8)]
ALL = Held(position=10, last_step_no=9, journal_from=0)
NOTHING = Held(position=0, last_step_no=-1, journal_from=0)
WHOLE = {0: True}


def with_fresh(*indices: int) -> list[Place]:
    return mark_fresh(PLACES, indices)


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (Overloaded("many steps wait"), "repeat"),
        (JournalGap("no longer kept"), "rebuild"),
        (OutOfOrder("too early"), "rebuild"),
        (NeedsReplay("cannot go back"), "rebuild all"),
        (SessionLost("expired"), "replace"),
        (HopFailed(A, "reset"), "replace"),
        (RemoteProtocolError("nonsense"), "replace"),
        (Unsupported("too long"), "give up"),
    ],
)
def test_the_kind_of_a_fault_says_what_to_do(fault: SwarmError, remedy: Remedy) -> None:
    assert remedy_for(fault, is_fed_by_us=True, again=False) == remedy


@pytest.mark.parametrize(
    ("lost", "index", "peer", "again", "remedy"),
    [
        ({}, 1, C, False, "repeat"),
        ({}, 1, C, True, "part"),
        ({2}, 1, C, True, "replace"),
        ({}, 1, D, True, "none"),
        ({}, 3, A, True, "none"),
    ],
)
def test_two_servers_that_cannot_reach_each_other_may_try_twice(
    lost: set[int], index: int, peer: PeerId, remedy: LinkRemedy, *, again: bool
) -> None:
    assert remedy_for_link(PLACES, lost, index, peer, again=again) == remedy


def test_neighbours_that_are_lost_together_are_replaced_as_one_run() -> None:
    assert lost_runs(PLACES, {1, 2}) == [range(2, 6)]
    assert lost_runs(PLACES, {0, 2, 3}) == [range(2), range(4, 8)]
    assert lost_runs(PLACES, set()) == []


def test_one_server_or_several_take_a_lost_run_and_everyone_else_stays() -> None:
    two = Route((RouteHop(E, 2, 5), RouteHop(B, 5, 6)), 1.0)
    assert replace_lost(PLACES, {1, 2}, {2: two}) == [
        PLACES[0], Place(E, 2, 5, is_fresh=True), Place(B, 5, 6, is_fresh=True), PLACES[3],
    ]  # fmt: skip


def test_a_lost_place_is_fed_by_the_one_before_it_and_nobody_else_is_rebuilt() -> None:
    for index in range(4):
        held = [NOTHING if place == index else ALL for place in range(4)]
        assert must_rebuild(with_fresh(index), held, WHOLE, last_answered=9) == {index}


def test_a_journal_with_a_gap_makes_its_owner_begin_afresh_too() -> None:
    gap = Held(10, 9, journal_from=4)
    assert must_rebuild(with_fresh(2), [ALL, gap, NOTHING, ALL], WHOLE, 9) == {1, 2}
    assert must_rebuild(with_fresh(2), [gap, gap, NOTHING, ALL], WHOLE, 9) == {0, 1, 2}


def test_who_lacks_answered_steps_has_lost_its_state() -> None:
    behind = Held(8, 7, journal_from=0)
    assert must_rebuild(PLACES, [ALL, behind, ALL, ALL], WHOLE, last_answered=9) == {1}
    assert must_rebuild(PLACES, [ALL, behind, ALL, ALL], WHOLE, last_answered=7) == set()


def test_who_stood_by_may_be_behind() -> None:
    places = [PLACES[0], Place(E, 2, 4, catches_up=True), *PLACES[2:]]
    assert must_rebuild(places, [ALL, Held(8, 7, 0), ALL, ALL], WHOLE, last_answered=9) == set()


def test_behind_a_border_without_its_history_all_before_it_begin_afresh() -> None:
    assert must_rebuild(with_fresh(2), [ALL, ALL, NOTHING, ALL], {0: True, 4: False}, 9) == {0, 1, 2}
    assert must_rebuild(with_fresh(2), [ALL, ALL, NOTHING, ALL], {0: True, 4: True}, 9) == {2}
    assert must_rebuild(with_fresh(3), [ALL, ALL, ALL, NOTHING], {0: True, 4: False}, 9) == {3}


def test_the_one_before_a_fresh_place_replays_all_and_then_goes_on() -> None:
    assert plan_resends(with_fresh(2), [ALL, ALL, NOTHING, ALL], [0]) == [Resend(1, 0, 0)]
    assert plan_resends(with_fresh(1, 2), [ALL, NOTHING, NOTHING, ALL], [0]) == [Resend(0, 0, 0)]


def test_who_stood_by_gets_what_it_lacks() -> None:
    places = [PLACES[0], Place(E, 2, 4, catches_up=True), *PLACES[2:]]
    assert plan_resends(places, [ALL, Held(8, 7, 0), ALL, ALL], [0]) == [Resend(0, 8, 0)]


def test_live_steps_that_a_place_missed_come_again_from_the_one_before_it() -> None:
    held = [ALL, ALL, Held(9, 8, 0), Held(9, 8, 0)]
    assert plan_resends(PLACES, held, [0]) == [Resend(1, None, 9)]


def test_across_a_border_the_client_sends_again_itself() -> None:
    assert plan_resends(with_fresh(2), [ALL, ALL, NOTHING, ALL], [0, 4]) == []
