"""Every family's report, and what to make of them: a table, and what changed between two.

`python -m corolla.models.survey` prints one JSON object a family, for `tools/latest.py`, which runs it in an
environment with another transformers. The table is part of `docs/families.md`; the test of the families keeps it true.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from corolla.models.parity import FamilyReport, Outcome, known_families, try_family

TABLE_BEGINS: Final = "<!-- table: written by tests/models/test_families.py, test_more_families.py -->"
TABLE_ENDS: Final = "<!-- end of table -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A report as the table shows it."""

    family: str
    outcome: Outcome
    cuts: str
    abilities: str
    remark: str


def survey(families: Sequence[str]) -> Iterator[FamilyReport]:
    """Try families, as many at a time as there are processors, and tell of them in this order."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=fresh, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield from pool.map(try_apart, families)


def try_apart(family: str) -> FamilyReport:
    """In a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="corolla-family-") as directory:
        return try_family(family, Path(directory))


def as_row(report: FamilyReport) -> Row:
    can = report.can
    if can is None or report.outcome != "right":
        return Row(report.family, report.outcome, "", "", _on_one_line(report.detail))
    everywhere = tuple(range(1, report.num_blocks))
    cuts = "everywhere" if can.cuts == everywhere else ", ".join(str(cut) for cut in can.cuts) or "nowhere"
    limits = (
        (can.needs_token_ids, "sends token ids"),
        (not can.can_trim, "cannot go back"),
        (not can.prefill_in_chunks, "prompt in one piece"),
        (not report.with_padding, "no padding"),
    )
    return Row(report.family, "right", cuts, ", ".join(text for holds, text in limits if holds), report.detail)


def _on_one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def as_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with a line before it that counts them."""
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("right", "refused", "wrong")}
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, tiny random models of "
        f"six blocks: of {len(rows)} families **{counts['right']} are right**, {counts['refused']} refused, "
        f"{counts['wrong']} wrong; {len(rows) - sum(counts.values())} could not be tried.",
        "",
        "| family | outcome | can be cut | limits | remark |",
        "|---|---|---|---|---|",
        *(
            f"| {row.family} | {row.outcome} | {row.cuts} | {row.abilities} | {_on_one_line(row.remark)} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def what_changed(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[str]:
    """One line for each family that came, went or came out otherwise; worst first."""
    lines: list[tuple[bool, str]] = []
    for family in sorted(before.keys() | after.keys()):
        old, new = before.get(family), after.get(family)
        if old == new:
            continue
        is_worse = new is not None and new.outcome != "right" and (old is None or old.outcome == "right")
        lines.append((not is_worse, f"{family}: {_said(old)} -> {_said(new)}"))
    return [line for _, line in sorted(lines)]


def _said(row: Row | None) -> str:
    if row is None:
        return "not there"
    details = "; ".join(text for text in (row.cuts and f"cut {row.cuts}", row.abilities, row.remark) if text)
    return f"{row.outcome} ({details})" if details else row.outcome


def rows_of_table(page: str) -> dict[str, Row]:
    """The rows of a page's table, by family."""
    table = page.partition(TABLE_BEGINS)[2].partition(TABLE_ENDS)[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: Row(*_checked(row)) for row in cells[1:]}


def _checked(cells: list[str]) -> tuple[str, Any, str, str, str]:
    family, outcome, cuts, abilities, remark = cells
    return family, outcome, cuts, abilities, remark


def with_rows(page: str, rows: Iterable[Row], families: Iterable[str]) -> str:
    """The page with these rows in the place of its own; of families that are not among `families` it keeps none."""
    by_family = rows_of_table(page) | {row.family: row for row in rows}
    return with_table(page, as_table([by_family[family] for family in families if family in by_family]))


def with_table(page: str, table: str) -> str:
    """The page with another table."""
    before, _, rest = page.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}\n{table}{TABLE_ENDS}{after}"


def main() -> None:
    for report in survey(sys.argv[1:] or known_families()):
        sys.stdout.write(json.dumps(asdict(as_row(report))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
