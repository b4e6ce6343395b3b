"""The other half of `test_families.py`, in a file of its own, so that two processes may share the families."""

import pytest

from corolla.models.parity import known_families

pytestmark = pytest.mark.full

HERE = known_families()[1::2]


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("family", HERE)
def test_a_family_is_right_or_refused_with_a_sentence(family, row_of):
    row = row_of(family)
    assert row.outcome != "wrong", row.remark
    if row.outcome == "refused":
        assert row.remark
        assert "\n" not in row.remark


@pytest.mark.timeout(2700)
def test_the_page_says_what_comes_out(row_of, hold_page_to):
    hold_page_to([row_of(family) for family in HERE])
