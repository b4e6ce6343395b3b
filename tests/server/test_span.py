"""Steps over real blocks: what a client may send."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from corolla.errors import Unsupported
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.server.span import TorchSpanRunner
from corolla.wire.messages import Step
from corolla.wire.tensors import WireTensor


def step_of(token_ids: Sequence[int], size: int) -> Step:
    shape = (1, len(token_ids))
    return Step(
        step_no=0, position=0, hidden=WireTensor("float32", (*shape, size), bytes(4 * len(token_ids) * size)),
        token_ids=WireTensor("int64", shape, struct.pack(f"<{len(token_ids)}q", *token_ids)),
    )  # fmt: skip


def test_a_token_id_that_the_model_does_not_have_is_refused_before_any_table_is_asked(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "llama")
    span = load_span(open_checkpoint(tmp_path / "tiny"), 0, 1)
    runner = TorchSpanRunner(span)
    for wrong in (-1, span.vocabulary, 1 << 62):
        with pytest.raises(Unsupported, match=f"token id {wrong}: .* 0 to {span.vocabulary - 1}"):
            runner.run(runner.new_cache(0, 1, 8), step_of([0, wrong], span.hidden_size), "all", "float32")
    runner.run(runner.new_cache(0, 1, 8), step_of([0, span.vocabulary - 1], span.hidden_size), "all", "float32")
