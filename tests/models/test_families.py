"""Every family that transformers knows is right in spans, or refused with a sentence; none is silently wrong.

Every other family is tried here, the rest in `test_more_families.py`: two processes may share them. Each file rewrites
its rows of the page's table when they are not what comes out: look at the change, and commit it if it is meant.
"""

from pathlib import Path

import pytest

from corolla.models.parity import known_families
from corolla.models.survey import (
    TABLE_BEGINS,
    TABLE_ENDS,
    Row,
    as_table,
    rows_of_table,
    what_changed,
    with_rows,
    with_table,
)

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

FAST = (
    "bamba",
    "bloom",
    "deepseek_v3",
    "falcon",
    "gemma3_text",
    "gpt_oss",
    "hy_v4",
    "llama",
    "mamba",
    "opt",
    "zamba2",
    "zaya",
)
"""A dozen that differ: rotary, learned and alibi positions, experts, recurrence, shared weights, a second stream."""
HERE = known_families()[0::2]


@pytest.mark.parametrize("family", FAST)
def test_a_dozen_unlike_families_are_right(family, row_of):
    row = row_of(family)
    assert row.outcome == "right", row.remark


@pytest.mark.full
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("family", HERE)
def test_a_family_is_right_or_refused_with_a_sentence(family, row_of):
    row = row_of(family)
    assert row.outcome != "wrong", row.remark
    if row.outcome == "refused":
        assert row.remark
        assert "\n" not in row.remark


@pytest.mark.full
@pytest.mark.timeout(2700)
def test_the_page_says_what_comes_out(row_of, hold_page_to):
    hold_page_to([row_of(family) for family in HERE])


def test_the_page_has_every_family_and_enough_are_right():
    page = rows_of_table(PAGE.read_text())
    assert list(page) == known_families()
    outcomes = [row.outcome for row in page.values()]
    assert outcomes.count("right") >= 150
    assert "wrong" not in outcomes


def rows(**outcomes):
    return {family: Row(family, outcome, "everywhere", "", "") for family, outcome in outcomes.items()}


def test_a_table_can_be_read_back():
    before = [*rows(llama="right", rwkv="refused").values(), Row("x", "right", "1, 5", "no padding", "a/b")]
    page = with_table(f"# Page\n{TABLE_BEGINS}\nold\n{TABLE_ENDS}\nafter\n", as_table(before))
    assert list(rows_of_table(page).values()) == before
    assert page.startswith("# Page\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page


def test_some_rows_of_a_table_can_be_put_in_the_place_of_others():
    page = with_table(f"{TABLE_BEGINS}\n{TABLE_ENDS}\n", as_table([*rows(a="right", gone="right", z="wrong").values()]))
    new = rows(z="right", b="refused").values()
    outcomes = {family: row.outcome for family, row in rows_of_table(with_rows(page, new, "abz")).items()}
    assert outcomes == {"a": "right", "b": "refused", "z": "right"}
    assert "of 3 families **2 are right**, 1 refused, 0 wrong" in with_rows(page, new, "abz")


def test_what_changed_says_what_got_worse_first():
    before, after = (
        rows(a="refused", b="right", c="right", d="right"),
        rows(a="right", b="refused", d="right", e="right"),
    )
    assert what_changed(before, after) == [
        "b: right (cut everywhere) -> refused (cut everywhere)",
        "a: refused (cut everywhere) -> right (cut everywhere)",
        "c: right (cut everywhere) -> not there",
        "e: not there -> right (cut everywhere)",
    ]
