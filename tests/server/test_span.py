"""Steps over real blocks: what a client may send."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from corolla.errors import Unsupported
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.server.span import TorchSpanRunner
from corolla.wire.messages import Step
from corolla.wire.tensors import WireTensor


def ids(name: str, values: Sequence[int], size: int) -> Step:
    shape = (1, len(values))
    step = Step(step_no=0, position=0, hidden=WireTensor("float32", (*shape, size), bytes(4 * len(values) * size)))
    return replace(step, **{name: WireTensor("int64", shape, struct.pack(f"<{len(values)}q", *values))})


@pytest.mark.parametrize("name", ["token_ids", "position_ids"])
def test_an_id_that_the_model_does_not_have_is_refused_before_any_table_is_asked(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "llama")
    span = load_span(open_checkpoint(tmp_path / "tiny"), 0, 1)
    assert span.max_positions is not None
    bound = span.vocabulary if name == "token_ids" else span.max_positions
    runner = TorchSpanRunner(span)
    for wrong in (-1, bound, 1 << 62):
        with pytest.raises(Unsupported, match=f"id {wrong}: .* 0 to {bound - 1}"):
            runner.run(runner.new_cache(0, 1, 8), ids(name, [0, wrong], span.hidden_size), "all", "float32")
    runner.run(runner.new_cache(0, 1, 8), ids(name, [0, bound - 1], span.hidden_size), "all", "float32")
