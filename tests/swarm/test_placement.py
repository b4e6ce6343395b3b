"""A new server goes where the swarm is weakest; what is nearly alike is told apart by what it is good for."""

import itertools
import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.cost import CostModel
from corolla.swarm.placement import Placed, block_rates, choose_span, near_weakest, windows
from corolla.swarm.view import ServerView, View

COST = CostModel()
ME = PeerId("me")


def announcement(
    start: int,
    end: int,
    num_blocks: int,
    *,
    rate: float = 100.0,
    state: Literal["joining", "online", "draining"] = "online",
) -> Announcement:
    return Announcement(
        state=state, start=start, end=end, num_blocks=num_blocks, fingerprint=Fingerprint("0" * 32),
        model_name="model", dtype="float32", decode_tokens_per_s=rate, free_cache_tokens=1000,
    )  # fmt: skip


def server(
    name: str,
    start: int,
    end: int,
    *,
    num_blocks: int = 12,
    rate: float = 100.0,
    state: Literal["joining", "online", "draining"] = "online",
) -> ServerView:
    said = announcement(start, end, num_blocks, rate=rate, state=state)
    return ServerView(PeerId(name), said, expires_at=0.0)


def chosen(
    servers: list[ServerView],
    length: int,
    *,
    num_blocks: int = 12,
    cuts: frozenset[int] | None = None,
    on_disk: frozenset[int] = frozenset(),
) -> tuple[int, int]:
    joining = announcement(0, length, num_blocks, state="joining")
    span = choose_span(View.of(servers), length, joining=joining, peer=ME, cost=COST, cuts=cuts, on_disk=on_disk)
    return span.start, span.stop


def test_an_empty_swarm_is_filled_from_the_front() -> None:
    servers: list[ServerView] = []
    for number in range(3):
        start, end = chosen(servers, 4)
        servers.append(server(f"server {number}", start, end))
    assert [(s.start, s.end) for s in servers] == [(0, 4), (4, 8), (8, 12)]


def test_a_gap_comes_first_and_then_the_slowest_blocks() -> None:
    ends = [server("a", 0, 4), server("b", 8, 12)]
    assert chosen(ends, 4) == (4, 8)
    slow_middle = [*ends, server("c", 4, 8, rate=1.0)]
    assert chosen(slow_middle, 4) == (4, 8)


def test_the_worst_block_decides_and_then_the_second_worst() -> None:
    rates = [9.0, 1.0, 9.0, 5.0, 1.0, 2.0]
    assert near_weakest(rates, windows(6, 2)) == [range(4, 6)]


def test_a_server_that_is_joining_counts_and_one_that_leaves_does_not() -> None:
    joining = [server("a", 0, 6), server("b", 6, 12, state="joining")]
    assert chosen(joining, 6) == (0, 6)
    assert chosen([server("a", 0, 6), server("b", 6, 12, state="draining")], 6) == (6, 12)


def test_what_the_view_says_of_the_server_itself_is_left_out() -> None:
    assert chosen([server("a", 0, 6), server("me", 6, 12, state="joining")], 6) == (6, 12)


def test_blocks_on_disk_win_near_ties_and_nothing_else() -> None:
    assert chosen([], 4, on_disk=frozenset(range(6, 10))) == (6, 10)
    assert chosen([server("a", 0, 8)], 4, on_disk=frozenset(range(4))) == (8, 12)


def test_a_shorter_chain_wins_a_near_tie_of_throughput() -> None:
    """All blocks are served alike; only from 0:6 does one more server make a chain of two instead of three."""
    servers = [
        server("a", 0, 4), server("b", 4, 6), server("c", 6, 12), server("d", 4, 8), server("e", 8, 12),
        server("f", 0, 4),
    ]  # fmt: skip
    rates = block_rates([Placed(s.peer, s.start, s.end, 100.0) for s in servers], 12)
    assert set(rates) == {200.0}
    assert chosen(servers, 6, on_disk=frozenset(range(5, 11))) == (0, 6)


def test_borders_where_the_model_cannot_be_cut_are_kept() -> None:
    cuts = frozenset([0, 3, 6, 9])
    assert [(span.start, span.stop) for span in windows(12, 4, cuts)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert chosen([server("a", 0, 3), server("b", 9, 12)], 4, cuts=cuts) == (3, 6)
    with pytest.raises(BadInput, match=r"2 blocks fit here.* has 3"):
        windows(12, 2, cuts)


def test_more_than_the_model_has_is_all_of_it() -> None:
    assert chosen([], 40) == (0, 12)


@given(st.integers(1, 60), st.integers(1, 60), st.none() | st.sets(st.integers(0, 60)))
def test_windows_lie_in_the_model_between_its_borders(num_blocks: int, length: int, cuts: set[int] | None) -> None:
    borders = set(range(num_blocks)) if cuts is None else {cut for cut in cuts if cut < num_blocks}
    try:
        spans = windows(num_blocks, length, None if cuts is None else borders)
    except BadInput:
        assert all(b - a > length for a, b in itertools.pairwise(sorted({0, num_blocks, *borders})))
        return
    for span in spans:
        assert 0 <= span.start < span.stop <= num_blocks
        assert len(span) <= length
        assert {span.start, span.stop} <= {0, num_blocks, *borders}


def test_the_throughput_of_a_block_is_the_sum_over_its_servers() -> None:
    rng = random.Random(0)
    for _ in range(50):
        placed = [
            Placed(PeerId(str(n)), start := rng.randrange(10), rng.randrange(start + 1, 12), rng.random())
            for n in range(rng.randrange(6))
        ]
        expected = [sum(s.rate for s in placed if s.start <= block < s.end) for block in range(12)]
        assert block_rates(placed, 12) == pytest.approx(expected)
        assert [rate == 0 for rate in block_rates(placed, 12)] == [rate == 0 for rate in expected]
