"""Every family that transformers knows is right in spans, or refused with a sentence; none is silently wrong."""

from pathlib import Path

import pytest
import transformers

from corolla.models.parity import known_families
from corolla.models.survey import TABLE_BEGINS, Row, as_row, as_table, rows_of_table, survey, what_changed, with_table

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
FAMILIES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in known_families()]


@pytest.fixture(scope="session")
def row_of():
    """The row of a family, found once."""
    rows = {}

    def row(family):
        if family not in rows:
            (report,) = survey([family])
            rows[family] = as_row(report)
        return rows[family]

    return row


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_right_or_refused_with_a_sentence(family, row_of):
    row = row_of(family)
    assert row.outcome != "wrong", row.remark
    if row.outcome == "refused":
        assert row.remark
        assert "\n" not in row.remark
    if family in FAST:
        assert row.outcome == "right", row.remark


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_s_table_is_what_comes_out(row_of):
    """Rewrites the table when it is not: look at the change, and commit it if it is meant."""
    rows = [row_of(family) for family in known_families()]
    assert sum(row.outcome == "right" for row in rows) >= 150
    page = PAGE.read_text()
    assert f"transformers {transformers.__version__}," in page, "the page is about another transformers: make latest"
    current = with_table(page, as_table(rows))
    if current != page:
        PAGE.write_text(current)
    assert current == page, "\n".join(what_changed(rows_of_table(page), {row.family: row for row in rows}))


def rows(**outcomes):
    return {family: Row(family, outcome, "everywhere", "", "") for family, outcome in outcomes.items()}


def test_a_table_can_be_read_back():
    before = [*rows(llama="right", rwkv="refused").values(), Row("x", "right", "1, 5", "no padding", "a/b")]
    page = with_table(f"# Page\n{TABLE_BEGINS}\nold\n<!-- end of table -->\nafter\n", as_table(before))
    assert list(rows_of_table(page).values()) == before
    assert page.startswith("# Page\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page


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
