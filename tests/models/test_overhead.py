"""The skeleton's cost is measured against the same blocks computing the same thing."""

import pytest

from corolla.models.loading import load_span
from corolla.models.overhead import measure_span_overhead


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_both_ways_are_timed_and_the_cache_is_left_alone(family, tiny):
    measured = measure_span_overhead(load_span(tiny(family), 1, 5), context_tokens=16, repeats=10)
    assert measured.num_blocks == 4
    assert 0 < measured.direct_s < 1
    assert 0 < measured.skeleton_s < 1
    assert measured.taped_overhead_s is not None
