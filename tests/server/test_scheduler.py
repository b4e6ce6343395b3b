"""Which steps run together: everyone's next decode, one prefill chunk between them, each session in order."""

from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from corolla.server.scheduler import Scheduler


@dataclass(frozen=True)
class Item:
    number: int
    session_key: str
    is_prefill: bool = False
    guest_key: str = "client"
    group_key: str = "net"
    is_listed: bool = False
    num_tokens: int = 1


def passes_of(scheduler: Scheduler[Item]) -> list[list[Item]]:
    passes: list[list[Item]] = []
    while batch := scheduler.take(0.0):
        passes.append(batch)
    return passes


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=50))
def test_every_step_runs_once_and_each_sessions_steps_in_their_order(kinds: list[tuple[str, bool]]) -> None:
    scheduler: Scheduler[Item] = Scheduler()
    for number, (session, is_prefill) in enumerate(kinds):
        scheduler.add(Item(number, session, is_prefill), 0.0)
    assert len(scheduler) == len(kinds)
    passes = passes_of(scheduler)
    assert len(scheduler) == 0
    ran = [item for batch in passes for item in batch]
    assert sorted(item.number for item in ran) == list(range(len(kinds)))
    by_session: dict[str, list[int]] = defaultdict(list)
    for item in ran:
        by_session[item.session_key].append(item.number)
    assert all(numbers == sorted(numbers) for numbers in by_session.values())
    for batch in passes:
        assert sum(item.is_prefill for item in batch) <= 1
        assert len({item.session_key for item in batch}) == len(batch)


def test_a_decode_that_comes_during_a_long_prompt_waits_for_one_chunk_only() -> None:
    scheduler: Scheduler[Item] = Scheduler()
    for number in range(3):
        scheduler.add(Item(number, "long", is_prefill=True), 0.0)
    assert [item.number for item in scheduler.take(0.0)] == [0]
    scheduler.add(Item(9, "other", is_prefill=False), 0.0)
    assert [item.number for item in scheduler.take(0.0)] == [9, 1]


def test_a_sessions_single_step_does_not_overtake_its_own_chunks() -> None:
    """A replay is a chunk and then single steps; run the other way round, they build another cache."""
    scheduler: Scheduler[Item] = Scheduler()
    for number, is_prefill in enumerate((True, False, False, True)):
        scheduler.add(Item(number, "one", is_prefill), 0.0)
    assert [[item.number for item in batch] for batch in passes_of(scheduler)] == [[0], [1], [2], [3]]


def test_two_prompts_take_turns() -> None:
    scheduler: Scheduler[Item] = Scheduler()
    for number, session in enumerate("aabb"):
        scheduler.add(Item(number, session, is_prefill=True), 0.0)
    assert [[item.number for item in batch] for batch in passes_of(scheduler)] == [[0], [1], [2], [3]]


@given(st.lists(st.tuples(st.sampled_from("aabc"), st.integers(0, 6), st.booleans(), st.booleans()), max_size=60))
def test_a_step_that_comes_alone_runs_as_if_it_had_stood_in_line(steps: list[tuple[str, int, bool, bool]]) -> None:
    """A lone decode step takes a shortcut past the lines, and leaves behind what those would have."""
    quick: Scheduler[Item] = Scheduler()
    lined: Scheduler[Item] = Scheduler()
    lined.add = lined._line_up  # type: ignore[method-assign]
    for number, (guest, num_tokens, is_listed, is_taken) in enumerate(steps):
        now = number / 8
        item = Item(number, guest, num_tokens > 1, f"guest {guest}", "net", is_listed, num_tokens)
        quick.add(item, now)
        lined.add(item, now)
        if is_taken:
            batch = quick.take(now)
            assert batch == lined.take(now)
            for done in batch:
                quick.ran(done, 0.2, now + 0.1)
                lined.ran(done, 0.2, now + 0.1)
            assert quick.pause_s(now) == lined.pause_s(now)


def test_a_listed_client_who_floods_is_not_in_the_way_of_another_listed_ones_steps() -> None:
    """They come in every pass, with one of the flood's beside them while it may run."""
    scheduler: Scheduler[Item] = Scheduler()
    for number in range(1, 65):
        scheduler.add(Item(number, f"flood {number}", guest_key="flood", is_listed=True), 0.0)
    now = 0.0
    for _ in range(8):
        scheduler.add(Item(0, "other", guest_key="other", is_listed=True), now)
        first, *rest = scheduler.take(now)
        assert first.number == 0
        assert len(rest) <= 1
        for item in (first, *rest):
            now += 0.006
            scheduler.ran(item, 0.006, now)
    assert 64 - 8 < len(scheduler) < 64
