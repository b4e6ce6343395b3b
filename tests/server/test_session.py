"""The session rules, without a network: exactly once, in order, within what was opened."""

import pytest
from msgspec.structs import replace

from corolla.errors import JournalGap, NeedsReplay, OutOfOrder, Unsupported
from corolla.ids import PeerId, SessionId
from corolla.server.session import (
    AnswerFromJournal,
    Break,
    Compute,
    Ignore,
    Refuse,
    SessionState,
    Wait,
    on_reopen,
    on_step,
)
from corolla.wire.journal import MAX_RECENT
from corolla.wire.messages import Open, Step
from corolla.wire.tensors import WireTensor

CLIENT = PeerId("client")
HIDDEN = 4


def state(**changes: object) -> SessionState:
    fresh = SessionState(
        session=SessionId(b"s" * 16),
        owner=CLIENT,
        upstream=CLIENT,
        route_version=0,
        max_tokens=16,
        max_rows=2,
        max_chunk_tokens=8,
        hidden_size=HIDDEN,
    )
    return replace(fresh, **changes)


def tensor(*shape: int, dtype: str = "float32") -> WireTensor:
    size = 8 if dtype == "int64" else 4
    count = 1
    for dim in shape:
        count *= dim
    return WireTensor(dtype, shape, b"\0" * (count * size))


def step(step_no: int, position: int, new_tokens: int = 1, batch: int = 1, **fields: object) -> Step:
    return Step(step_no=step_no, position=position, hidden=tensor(batch, new_tokens, HIDDEN), **fields)


def after(*steps: Step, start: SessionState | None = None) -> SessionState:
    current = start or state()
    for one in steps:
        current, action = on_step(current, one)
        assert isinstance(action, Compute), action
    return current


def refused(current: SessionState, one: Step) -> Refuse:
    unchanged, action = on_step(current, one)
    assert unchanged == current
    assert isinstance(action, Refuse), action
    return action


def test_the_next_step_is_computed_and_moves_position_and_count() -> None:
    moved, action = on_step(state(), step(0, 0, new_tokens=4, batch=2))
    assert isinstance(action, Compute)
    assert (moved.position, moved.rows, moved.last_step_no, action.new_tokens) == (4, 2, 0, 4)


def test_a_repeated_step_is_answered_and_changes_nothing() -> None:
    current = after(step(0, 0, 5), step(1, 5))
    assert on_step(current, step(1, 5)) == (current, AnswerFromJournal(1))


def test_another_step_under_the_same_number_breaks_the_protocol() -> None:
    current = after(step(0, 0, 5), step(1, 5))
    assert isinstance(on_step(current, step(1, 3))[1], Break)


def test_an_older_step_is_answered_while_it_is_kept_then_a_gap_and_an_early_one_is_out_of_order() -> None:
    current = after(step(0, 0, 5), step(1, 5))
    assert on_step(current, step(0, 0, 5)) == (current, AnswerFromJournal(0))
    early = refused(current, step(3, 6)).error
    assert isinstance(early, OutOfOrder)
    assert (early.value, early.bound) == ("3", "2")
    later = after(*(step(number, number) for number in range(MAX_RECENT + 2)))
    assert isinstance(refused(later, step(0, 0)).error, JournalGap)


def test_after_a_trim_to_nothing_a_server_that_has_taken_nothing_in_lacks_nothing() -> None:
    fresh = state()
    assert after(step(7, 0, 3, trim_to=0), step(8, 3), start=fresh).last_step_no == 8
    assert isinstance(refused(fresh, step(8, 3)).error, OutOfOrder)
    assert isinstance(refused(after(step(0, 0)), step(7, 0, trim_to=0)).error, OutOfOrder)


def test_data_of_an_older_route_is_ignored_and_of_a_newer_one_waits_for_its_open() -> None:
    current = state(route_version=2)
    assert on_step(current, step(0, 0, route_version=1)) == (current, Ignore())
    assert on_step(current, step(0, 0, route_version=3)) == (current, Wait())


def test_a_replay_fills_an_empty_session_in_chunks_and_then_single_steps_go_on() -> None:
    chunks = [step(4, 0, 3, replay=True), step(4, 3, 2, replay=True), step(5, 4, trim_to=4, replay=True), step(6, 5)]
    current = after(*chunks)
    assert (current.position, current.last_step_no) == (6, 6)
    assert on_step(current, step(5, 4, trim_to=4, replay=True)) == (current, Ignore())


def test_a_replay_of_what_is_held_changes_nothing_and_one_with_a_gap_is_refused() -> None:
    current = after(step(0, 0, 5), step(1, 5))
    assert on_step(current, step(1, 0, 6, replay=True)) == (current, Ignore())
    assert isinstance(refused(current, step(2, 8, replay=True)).error, OutOfOrder)


@pytest.mark.parametrize("replay", [False, True])
def test_a_family_that_takes_several_positions_only_as_the_first_refuses_others(replay: bool) -> None:
    current = after(step(0, 0, 5, replay=replay), step(1, 5, replay=replay), start=state(prefill_in_chunks=False))
    error = refused(current, step(2, 6, 2, replay=replay)).error
    assert isinstance(error, Unsupported)
    assert (error.value, error.bound) == ("2", "1")
    assert after(step(2, 0, 4, trim_to=0), start=current).position == 4


def test_a_new_route_keeps_what_is_held_unless_it_begins_afresh() -> None:
    current = after(step(0, 0, 5))
    again = on_reopen(current, reopen(1, is_fresh=False))
    assert (again.route_version, again.position, again.last_step_no) == (1, 5, 0)
    fresh = on_reopen(current, reopen(1, is_fresh=True))
    assert (fresh.position, fresh.last_step_no, fresh.rows) == (0, -1, 0)
    with pytest.raises(OutOfOrder):
        on_reopen(again, reopen(1, is_fresh=False))


def reopen(route_version: int, *, is_fresh: bool) -> Open:
    return Open(
        session=SessionId(b"s" * 16), route_version=route_version, fingerprint="f" * 32, start=0, end=4, max_tokens=16,
        upstream=PeerId("other"), wire_dtype="float32", is_fresh=is_fresh,
    )  # fmt: skip


def test_a_step_must_start_where_the_cache_ends() -> None:
    current = after(step(0, 0, 5))
    assert isinstance(refused(current, step(1, 4)).error, OutOfOrder)


def test_a_trim_rides_on_a_step_and_cannot_lengthen() -> None:
    current = after(step(0, 0, 5), step(1, 3, trim_to=3))
    assert current.position == 4
    assert isinstance(refused(current, step(2, 9, trim_to=9)).error, Unsupported)
    assert isinstance(refused(replace(current, can_trim=False), step(2, 1, trim_to=1)).error, NeedsReplay)


def test_the_session_never_grows_beyond_what_it_was_opened_for() -> None:
    current = after(step(0, 0, 8), step(1, 8, 8))
    error = refused(current, step(2, 16)).error
    assert isinstance(error, Unsupported)
    assert (error.value, error.bound) == ("17", "16")


@pytest.mark.parametrize(
    "bad",
    [
        step(1, 5, batch=2),
        step(1, 5, new_tokens=9),
        step(1, 5, rows=[0, 0, 0]),
        step(1, 5, rows=[1]),
        step(1, 5, left_padding=[0, 0]),
        step(1, 5, position_ids=tensor(1, 2, dtype="int64")),
        step(1, 5, position_ids=tensor(1, 1)),
        Step(step_no=1, position=5, hidden=tensor(1, 1, HIDDEN + 1)),
        Step(step_no=1, position=5, hidden=tensor(1, HIDDEN)),
        Step(step_no=1, position=5, hidden=tensor(1, 0, HIDDEN)),
        Step(step_no=1, position=5, hidden=tensor(1, 1, HIDDEN, dtype="int64")),
    ],
    ids=["more rows", "too many tokens", "gather too long", "gather out of range", "padding", "ids shape", "ids dtype",
         "hidden size", "rank", "empty", "whole numbers"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(bad: Step) -> None:
    assert isinstance(refused(after(step(0, 0, 5)), bad).error, Unsupported)


def test_a_row_gather_may_multiply_and_drop_rows_within_the_lease() -> None:
    current = after(step(0, 0, 5), step(1, 5))
    wider = Step(step_no=2, position=6, rows=[0, 0], hidden=tensor(2, 1, HIDDEN))
    current = after(wider, start=current)
    assert current.rows == 2
    narrower = Step(step_no=3, position=7, rows=[1], hidden=tensor(1, 1, HIDDEN))
    assert after(narrower, start=current).rows == 1
    too_wide = Step(step_no=3, position=7, rows=[0, 0, 0], hidden=tensor(3, 1, HIDDEN))
    assert isinstance(refused(current, too_wide).error, Unsupported)


def test_token_ids_are_asked_for_only_where_the_family_needs_them() -> None:
    current = state(needs_token_ids=True)
    error = refused(current, step(0, 0)).error
    assert isinstance(error, Unsupported)
    assert (error.value, error.bound) == ("none", "int64 [1, 1]")
    after(step(0, 0, token_ids=tensor(1, 1, dtype="int64")), start=current)
