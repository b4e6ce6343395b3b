"""Tiny checkpoints, written once a session, the whole model to compare with, and what becomes of each family."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.locks import wait_for_lock
from corolla.models.parity import known_families
from corolla.models.survey import Row, as_row, rows_of_table, try_apart, what_changed, with_rows
from corolla.models.testing import write_tiny

FAMILIES_PAGE = Path(__file__).parents[2] / "docs" / "families.md"

torch.set_num_threads(1)  # two shared cores: two threads a test make tiny steps ten times slower


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """The tiny random checkpoint of a family."""
    written: dict[str, Path] = {}

    def checkpoint(family: str) -> Checkpoint:
        if family not in written:
            written[family] = write_tiny(tmp_path_factory.mktemp(family), family)
        return open_checkpoint(written[family])

    return checkpoint


@pytest.fixture(scope="session")
def whole() -> Callable[..., PreTrainedModel]:
    """The whole model, as transformers itself loads it."""

    def model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=dtype).eval()

    return model


@pytest.fixture(scope="session")
def row_of() -> Callable[[str], Row]:
    """What becomes of a family, found once."""
    rows: dict[str, Row] = {}

    def row(family: str) -> Row:
        if family not in rows:
            report = try_apart(family)
            rows[family] = as_row(report)
        return rows[family]

    return row


@pytest.fixture
def hold_page_to() -> Callable[[Sequence[Row]], None]:
    """Rewrites these rows of the page's table where they are others, and fails then.

    Two processes hold it to a half of the families each.
    """

    def hold(rows: Sequence[Row]) -> None:
        with wait_for_lock(Path(tempfile.gettempdir()) / "corolla-families-page.lock", timeout_s=600):
            page = FAMILIES_PAGE.read_text()
            assert f"transformers {transformers.__version__}," in page, "about another transformers: make latest"
            current = with_rows(page, rows, known_families())
            if current != page:
                FAMILIES_PAGE.write_text(current)
        assert current == page, "\n".join(what_changed(rows_of_table(page), rows_of_table(current)))

    return hold
