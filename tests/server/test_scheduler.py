"""Which steps run together: everyone's decode, and one prefill chunk between them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from corolla.server.scheduler import Scheduler


@dataclass(frozen=True)
class Item:
    number: int
    is_prefill: bool


@given(st.lists(st.booleans(), max_size=50))
def test_every_step_runs_once_decodes_first_and_prefills_one_at_a_time_in_order(kinds: list[bool]) -> None:
    scheduler: Scheduler[Item] = Scheduler()
    for number, is_prefill in enumerate(kinds):
        scheduler.add(Item(number, is_prefill))
    assert len(scheduler) == len(kinds)
    passes: list[list[Item]] = []
    while batch := scheduler.take():
        passes.append(batch)
    ran = [item for batch in passes for item in batch]
    assert sorted(item.number for item in ran) == list(range(len(kinds)))
    for is_prefill in (True, False):
        order = [item.number for item in ran if item.is_prefill == is_prefill]
        assert order == sorted(order)
    assert all(sum(item.is_prefill for item in batch) <= 1 for batch in passes)
    if passes:
        assert [item.is_prefill for item in passes[0]] == sorted(item.is_prefill for item in passes[0])


def test_a_decode_that_comes_during_a_long_prompt_waits_for_one_chunk_only() -> None:
    scheduler: Scheduler[Item] = Scheduler()
    for number in range(3):
        scheduler.add(Item(number, is_prefill=True))
    assert [item.number for item in scheduler.take()] == [0]
    scheduler.add(Item(9, is_prefill=False))
    assert [item.number for item in scheduler.take()] == [9, 1]
