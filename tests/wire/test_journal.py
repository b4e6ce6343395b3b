"""The journal: replaying it gives exactly the history that the steps amounted to."""

import math
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.wire import journal as journal_module
from corolla.wire.journal import MAX_RECENT, MAX_SEGMENTS, Journal
from corolla.wire.messages import Step
from corolla.wire.tensors import WireTensor
from corolla.wire.verbatim import VerbatimJournal

HUGE = 1 << 40


def hidden(rows: list[list[int]]) -> WireTensor:
    """Each number is one position: two float32, never read as floats."""
    flat = [number for row in rows for number in row]
    return WireTensor("float32", (len(rows), len(rows[0]), 2), struct.pack(f"<{len(flat)}Q", *flat))


def numbers(tensor: WireTensor) -> list[list[int]]:
    batch, tokens = tensor.shape[:2]
    flat = struct.unpack(f"<{batch * tokens}Q", tensor.data)
    return [list(flat[row * tokens : (row + 1) * tokens]) for row in range(batch)]


def add(journal: Journal, step_no: int, position: int, positions: list[list[int]], **fields: object) -> None:
    journal.add(Step(step_no=step_no, position=position, hidden=hidden(positions), **fields))


def replayed(steps: list[Step]) -> list[list[int]]:
    """What a cache would hold after these steps, and that they are in order."""
    held: list[list[int]] = []
    for step in steps:
        if step.trim_to is not None:
            held = [row[: step.trim_to] for row in held]
        if step.rows is not None:
            held = [list(held[row]) for row in step.rows]
        new = numbers(step.hidden)
        held = held or [[] for _ in new]
        assert step.position == len(held[0])
        held = [row + more for row, more in zip(held, new, strict=True)]
    return held


def everything(journal: Journal, max_tokens: int = 7, max_bytes: int = HUGE) -> list[Step]:
    journal.compact()
    return [*journal.replay(0, max_tokens, max_bytes), *journal.recent(0)]


@given(st.data())
def test_a_replay_is_the_history_whatever_was_trimmed_gathered_and_merged(data: st.DataObject) -> None:
    journal, held = Journal(HUGE), [[data.draw(st.integers(0, 99))] for _ in range(data.draw(st.integers(1, 3)))]
    add(journal, 0, 0, held)
    for step_no in range(1, data.draw(st.integers(1, 40))):
        fields: dict[str, object] = {}
        if data.draw(st.integers(0, 5)) == 0:
            fields["trim_to"] = data.draw(st.integers(1, len(held[0])))
            held = [row[: fields["trim_to"]] for row in held]
        if data.draw(st.integers(0, 5)) == 0:
            fields["rows"] = data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=3))
            held = [list(held[row]) for row in fields["rows"]]
        new = [data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=2)) for _ in held]
        add(journal, step_no, len(held[0]), new, **fields)
        held = [row + more for row, more in zip(held, new, strict=True)]
    steps = everything(journal, max_tokens=data.draw(st.integers(3, 50)))
    assert replayed(steps) == held
    assert all(step.replay and step.want == "none" for step in steps[: -len(journal.recent(0))])


@given(st.integers(1, 200), st.integers(1, 40), st.integers(16, 400))
def test_replay_chunks_keep_their_bounds(num_steps: int, max_tokens: int, max_bytes: int) -> None:
    journal = Journal(HUGE)
    for step_no in range(num_steps):
        add(journal, step_no, step_no, [[step_no]])
    history = list(journal.replay(0, max_tokens, max_bytes))
    assert all(step.hidden.shape[1] <= max_tokens and step.hidden.nbytes <= max_bytes for step in history)
    assert replayed([*history, *journal.recent(0)]) == [list(range(num_steps))]


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 40), st.integers(0, 80))
def test_without_chunks_only_what_comes_onto_nothing_is_long(
    num_steps: int, prompt: int, max_tokens: int, held: int
) -> None:
    journal = Journal(HUGE)
    add(journal, 0, 0, [list(range(prompt))])
    for step_no in range(1, num_steps):
        add(journal, step_no, prompt + step_no - 1, [[prompt + step_no - 1]])
    journal.compact()
    history = list(journal.replay(0, max_tokens, HUGE, in_chunks=False))
    assert replayed([*history, *journal.recent(0)]) == [list(range(prompt + num_steps - 1))]
    assert [step.hidden.shape[1] for step in history[1:]] == [1] * len(history[1:])
    assert len(history) == max(min(journal.history_end, 1), journal.history_end - max_tokens + 1)
    catching_up = list(journal.replay(max(held, 1), max_tokens, HUGE, in_chunks=False))
    assert all(step.hidden.shape[1] == 1 for step in catching_up)


def test_a_long_decode_becomes_few_replay_steps() -> None:
    journal = Journal(HUGE)
    for step_no in range(2000):
        add(journal, step_no, step_no, [[step_no]])
    journal.compact()
    assert len(list(journal.replay(0, 4096, HUGE))) == 1


def test_the_newest_steps_are_kept_as_they_were() -> None:
    journal = Journal(HUGE)
    for step_no in range(MAX_RECENT + 5):
        add(journal, step_no, step_no, [[step_no]])
    kept = journal.recent(0)
    assert [step.step_no for step in kept] == list(range(5, MAX_RECENT + 5))
    assert [step.step_no for step in journal.recent(9)] == list(range(9, MAX_RECENT + 5))
    journal.forget(10)
    assert journal.last_step_no == 9
    assert replayed(everything(journal)) == [list(range(10))]


def test_beyond_its_cap_the_oldest_go_first_and_the_gap_is_told() -> None:
    journal = Journal(max_bytes=20 * 8)
    for step_no in range(50):
        add(journal, step_no, step_no, [[step_no]])
        assert journal.nbytes <= 20 * 8
    assert journal.first_position > 0
    steps = [*journal.replay(journal.first_position, 100, HUGE), *journal.recent(0)]
    assert [number for step in steps for number in numbers(step.hidden)[0]] == list(range(journal.first_position, 50))


@pytest.mark.parametrize("kind", [Journal, VerbatimJournal])
def test_a_gap_ends_where_the_text_is_begun_anew(kind: type[Journal]) -> None:
    journal = kind(HUGE)
    add(journal, 0, 0, [[1, 2, 3, 4]])
    journal.skip(4)
    add(journal, 1, 2, [[5]], trim_to=2)
    assert not journal.covers(1)
    for step_no in range(2, 4 + MAX_RECENT):
        add(journal, step_no, step_no - 2, [[step_no]], trim_to=0 if step_no == 2 else None)
    assert journal.covers(3 + MAX_RECENT)
    assert replayed(everything(journal)) == [list(range(2, 4 + MAX_RECENT))]


def test_a_part_of_the_history_can_be_replayed() -> None:
    journal = Journal(HUGE)
    for step_no in range(30):
        add(journal, step_no, step_no, [[step_no]])
    steps = [*journal.replay(17, 4, HUGE), *journal.recent(0)]
    assert [number for step in steps for number in numbers(step.hidden)[0]] == list(range(17, 30))
    assert steps[0].position == 17


def test_what_was_replayed_to_us_can_be_replayed_by_us() -> None:
    first, second = Journal(HUGE), Journal(HUGE)
    for step_no in range(30):
        add(first, step_no, step_no, [[step_no], [100 + step_no]])
    for step in everything(first):
        if step.replay:
            second.add_history(step)
        else:
            second.add(step)
    assert second.first_position == 0
    assert replayed(everything(second)) == [list(range(30)), list(range(100, 130))]


def test_side_inputs_travel_with_their_positions() -> None:
    journal = Journal(HUGE)
    for step_no in range(20):
        ids = WireTensor("int64", (2, 1), struct.pack("<2q", step_no, -step_no))
        add(journal, step_no, step_no, [[step_no], [step_no]], position_ids=ids, token_ids=ids, left_padding=[0, 3])
    journal.compact()
    (step,) = journal.replay(0, 1000, HUGE)
    assert step.left_padding == [0, 3]
    for ids in (step.position_ids, step.token_ids):
        assert ids is not None
        count = ids.shape[1]
        assert struct.unpack(f"<{2 * count}q", ids.data) == (*range(count), *(-n for n in range(count)))


def test_positions_that_went_another_way_leave_a_gap() -> None:
    journal = Journal(HUGE)
    add(journal, 0, 0, [[1, 2, 3]])
    journal.skip(5)
    assert (journal.first_position, journal.history_end, journal.nbytes) == (5, 5, 0)
    with pytest.raises(AssertionError):
        add(journal, 0, 5, [[1]])


def test_what_may_yet_be_forgotten_is_not_folded() -> None:
    """A prompt of more steps than are kept as they were fails at its last one: none of it ever counted."""
    journal = Journal(HUGE)
    add(journal, 0, 0, [[1, 2], [3, 4]])
    journal.forgettable_from = 1
    add(journal, 1, 1, [[5], [6]], trim_to=1, rows=[1, 0])
    for step_no in range(2, MAX_RECENT + 5):
        add(journal, step_no, step_no, [[7], [8]])
    journal.forget(1)
    assert replayed(everything(journal)) == [[1], [3]], "trimmed at once, as the client has counted; not gathered"
    assert journal.covers(0)
    assert not journal.covers(1)


def test_a_journal_covers_a_step_when_nothing_before_it_is_missing() -> None:
    journal = Journal(HUGE)
    assert journal.covers(-1), "there is nothing to hold yet"
    assert not journal.covers(0)
    add(journal, 3, 5, [[9]])
    assert not journal.covers(3), "five positions before it are missing"
    whole = Journal(HUGE)
    add(whole, 0, 0, [[1, 2, 3, 4, 5]])
    add(whole, 3, 5, [[9]])
    assert whole.covers(3)
    whole.skip(6)
    assert not whole.covers(3)


@pytest.mark.parametrize("kind", [Journal, VerbatimJournal])
@pytest.mark.parametrize("held", [0, 2])
def test_a_gap_is_not_forgotten_when_the_step_behind_it_is_folded(kind: type[Journal], held: int) -> None:
    """As for a client that comes to stand between two servers while steps are under way (life 4190 of the random ones):
    what follows would be replayed as if it began where the gap does."""
    journal = kind(HUGE)
    if held:
        add(journal, 0, 0, [list(range(held))])
    for step_no in range(5, 8 + MAX_RECENT):
        add(journal, step_no, step_no, [[step_no]])
    last = 7 + MAX_RECENT
    assert not journal.covers(last)
    assert journal.first_position == 5
    assert journal.history_end + len(journal.recent(0)) == last + 1
    assert journal.nbytes == 8 * (last - 4)
    add(journal, last + 1, 5, [[50]], trim_to=5)
    add(journal, last + 2, 6, [[51]])
    assert not journal.covers(last + 2), "what is missing lies before"


def test_the_cap_holds_while_a_history_is_replayed_to_us_too() -> None:
    journal = Journal(max_bytes=20 * 8)
    for position in range(0, 60, 5):
        journal.add_history(Step(step_no=59, position=position, replay=True, hidden=hidden([[*range(5)]])))
        assert journal.nbytes <= 20 * 8
    assert (journal.first_position, journal.history_end) == (40, 60)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that merging made."""
    made: list[int] = []
    join = journal_module._join

    def counted(parts: Sequence[tuple[WireTensor, list[int], int]]) -> WireTensor:
        joined = join(parts)
        made.append(joined.nbytes)
        return joined

    monkeypatch.setattr(journal_module, "_join", counted)
    return made


@pytest.mark.parametrize("num_steps", [500, 8000])
def test_keeping_a_step_copies_few_bytes_however_long_the_history_is(num_steps: int, copies: list[int]) -> None:
    journal = Journal(HUGE)
    for step_no in range(num_steps):
        add(journal, step_no, step_no, [[step_no]])
    assert sum(copies) <= 8 * num_steps * (2 + math.log2(num_steps / MAX_SEGMENTS))
    assert len(journal._segments) <= 2 * MAX_SEGMENTS, "a row gather touches them all"
    assert replayed(everything(journal, max_tokens=1000)) == [[*range(num_steps)]]


@settings(max_examples=30)
@given(st.data())
def test_whatever_is_trimmed_the_bytes_copied_are_a_small_multiple_of_those_kept(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made: list[int] = []
        join = journal_module._join
        patch.setattr(journal_module, "MAX_SEGMENTS", 4)
        patch.setattr(journal_module, "_join", lambda parts: made.append(sum(p[2] for p in parts)) or join(parts))
        journal, position, added = Journal(HUGE), 0, 0
        for step_no in range(data.draw(st.integers(1, 150))):
            trim_to = None
            if position and data.draw(st.integers(0, 9)) == 0:
                position = trim_to = data.draw(st.integers(max(position - 20, 0), position))
            size = data.draw(st.sampled_from([1, 1, 1, 1, 7]))
            add(journal, step_no, position, [[*range(position, position + size)]], trim_to=trim_to)
            position, added = position + size, added + size
            assert journal.history_end + sum(step.hidden.shape[1] for step in journal.recent(0)) == position
        assert sum(made) <= added * (2 + math.log2(added))
        assert replayed(everything(journal)) == [[*range(position)]]


def test_no_step_waits_for_the_copy_of_a_long_history(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    monkeypatch.setattr(journal_module, "RUN_BYTES", 1024)
    journal = Journal(max_bytes=8 * 4000)
    for step_no in range(5000):
        add(journal, step_no, step_no, [[step_no]])
    assert max(copies) <= 1024
    assert journal.history_end - journal.first_position >= 3800, "the cap took the oldest, not the whole history"
    copies.clear()
    journal.compact()
    assert len(list(journal.replay(0, 8192, HUGE))) == 1


# --- of exact sessions


@given(st.data())
def test_a_verbatim_journal_repeats_the_steps_as_they_were(data: st.DataObject) -> None:
    journal, steps, held = VerbatimJournal(HUGE), list[Step](), 0
    for step_no in range(data.draw(st.integers(1, 40))):
        trim_to = data.draw(st.integers(1, held)) if held and data.draw(st.integers(0, 4)) == 0 else None
        held = held if trim_to is None else trim_to
        rows = [0] if held and data.draw(st.booleans()) else None
        size = data.draw(st.integers(1, 5))
        positions = [list(range(size))]
        add(journal, step_no, held, positions, trim_to=trim_to, rows=rows)
        steps.append(Step(step_no=step_no, position=held, hidden=hidden(positions), trim_to=trim_to, rows=rows))
        held += size
    kept = everything(journal, max_tokens=1, max_bytes=1)
    assert kept[-len(journal.recent(0)) :] == steps[-MAX_RECENT:]
    assert [(s.step_no, s.position, s.trim_to, s.rows, s.hidden) for s in kept] == [
        (s.step_no, s.position, s.trim_to, s.rows, s.hidden) for s in steps
    ]
    assert all(step.replay and step.want == "none" for step in kept[: -len(journal.recent(0))])
    again = VerbatimJournal(HUGE)
    for step in kept:
        (again.add_history if step.replay else again.add)(step)
    assert [step.step_no for step in everything(again)] == [step.step_no for step in steps]
    assert again.nbytes == journal.nbytes == sum(step.hidden.nbytes for step in steps)


@settings(max_examples=30)
@given(st.data())
def test_a_verbatim_journal_that_is_cut_back_asks_for_no_trim(data: st.DataObject) -> None:
    """Of a family that cannot: only what still counts is left, each row where the gathers that went have put it."""
    journal, held, step_no = VerbatimJournal(HUGE), [[0]], 1
    add(journal, 0, 0, held)
    for _ in range(data.draw(st.integers(1, 30))):
        fields: dict[str, object] = {}
        if data.draw(st.integers(0, 3)) == 0:
            fields["rows"] = data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=3))
        trims = data.draw(st.integers(0, 5)) == 0
        if trims:
            fields["trim_to"] = data.draw(st.integers(1, len(held[0])))
            held = [row[: fields["trim_to"]] for row in held]
        before = held
        if (rows := fields.get("rows")) is not None:
            held = [list(held[row]) for row in rows]
        size = data.draw(st.integers(1, 4))
        new = [data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)) for _ in held]
        add(journal, step_no, len(held[0]), new, left_padding=[row[0] for row in held], **fields)
        held = [row + more for row, more in zip(held, new, strict=True)]
        if trims:
            journal.cut_back(step_no, fields["trim_to"])
            if data.draw(st.booleans()):  # the run failed; its next step is another
                journal.forget(step_no)
                held = before
                continue
        step_no += 1
    steps, end = everything(journal), 0
    assert replayed(steps) == held
    for step in steps:
        assert step.trim_to in (None, end)
        end = step.position + step.hidden.shape[1]
    assert [step.step_no for step in steps] == sorted({step.step_no for step in steps})
    assert steps[-1].step_no == step_no - 1
    assert journal.nbytes == sum(step.hidden.nbytes for step in steps)
    assert steps[-1].left_padding in (None, [row[0] for row in held])


def test_a_verbatim_journal_goes_on_from_a_position() -> None:
    journal = VerbatimJournal(HUGE)
    for step_no in range(30):
        add(journal, step_no, 2 * step_no, [[step_no, step_no]])
    assert [step.step_no for step in journal.replay(34, 1, 1)] == [17, 18, 19, 20, 21]
    assert list(journal.replay(58, 1, 1)) == []


def test_beyond_its_cap_a_verbatim_journal_is_a_gap() -> None:
    journal = VerbatimJournal(max_bytes=20 * 8)
    for step_no in range(50):
        add(journal, step_no, step_no, [[step_no]])
        assert journal.nbytes <= 20 * 8
    assert journal.first_position > 0
    assert not journal.covers(49)


def test_what_a_verbatim_journal_forgot_from_the_start_costs_nothing() -> None:
    journal = VerbatimJournal(HUGE)
    for step_no in range(20):
        add(journal, step_no, step_no, [[step_no]])
    for step_no in range(20, 40):
        add(journal, step_no, step_no - 20, [[step_no]], trim_to=0 if step_no == 20 else None)
    assert [step.step_no for step in everything(journal)] == list(range(20, 40))
    assert journal.nbytes == 20 * 8
