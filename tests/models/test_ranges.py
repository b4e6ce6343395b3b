"""Ranges stand for sets of bytes: each operation does to the ranges what it says of the sets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from corolla.models.ranges import count_bytes, merge, split, subtract

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))))


def bytes_in(ranges):
    return {number for start, end in ranges for number in range(start, end)}


@given(ranges=RANGES)
def test_merged_ranges_hold_the_same_bytes_in_order_and_apart(ranges):
    merged = merge(ranges)
    assert bytes_in(merged) == bytes_in(ranges)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(merged))
    assert count_bytes(merged) == len(bytes_in(ranges))


@given(wanted=RANGES, held=RANGES)
def test_what_is_missing_is_what_is_wanted_and_not_held(wanted, held):
    missing = subtract(wanted, held)
    assert bytes_in(missing) == bytes_in(wanted) - bytes_in(held)
    assert count_bytes(missing) == len(bytes_in(missing))


@given(ranges=RANGES, most=st.integers(1, 9))
def test_pieces_hold_the_same_bytes_and_none_is_too_long(ranges, most):
    pieces = split(merge(ranges), most)
    assert bytes_in(pieces) == bytes_in(ranges)
    assert all(0 < end - start <= most for start, end in pieces)
