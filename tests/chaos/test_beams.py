"""Beams over real blocks lose servers: rows are gathered and padded at the left, one prompt ends before the other, and
the tokens are those of the whole model on one machine.

The journals hold what was pushed for rows that have been thrown away since; what is replayed must be the others'.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.background import background_loop
from corolla.client.config import ClientConfig
from corolla.client.connection import Connection
from corolla.client.model import load_distributed_model
from corolla.client.router import ServedModel
from corolla.client.session import Session
from corolla.client.swarm import Swarm
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.server.runner import SpanRunner
from corolla.server.span import TorchSpanRunner

pytestmark = pytest.mark.slow

SPANS = ("0:2", "2:4", "4:6")
PROMPTS = torch.tensor([[61, 116, 84, 17, 100, 4, 23], [0, 0, 0, 95, 42, 103, 92]])
PADDED = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
NUM_BEAMS, NEW_TOKENS, ENDS_AFTER = 3, 26, 7
PAD, END = 0, 1  # transformers fills up what has ended with the latter
UNLIKELY = 1e4
LOSSES = {4: "2:4", 16: "0:2", 22: "4:6"}
"""After which token the server of which blocks dies: before and after one prompt's text has ended."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MemoryConnection(Connection):
    """In the place of a daemon: servers and client in one thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = ClientConfig()
        self._loop = background_loop()
        self._model = ServedModel.of(checkpoint)
        self._servers = MemorySwarm(num_blocks=checkpoint.num_blocks)
        self._runners: dict[str, SpanRunner] = {
            span: TorchSpanRunner(load_span(checkpoint, *map(int, span.split(":")))) for span in SPANS
        }
        self._client = self.run(self._serve())

    @property
    def swarm(self) -> Swarm:
        return self._client

    def close(self) -> None:
        self.run(self._servers.__aexit__(None, None, None))

    async def _serve(self) -> Swarm:
        await self._servers.__aenter__()
        for span in SPANS:
            await self._servers.serve(span, span, model=self._model, runner=self._runners[span])
        return await self._servers.client("client", self.config)

    async def lose(self, span: str) -> None:
        """Another takes the place of the server of these blocks."""
        await self._servers.serve(f"another {span}", span, model=self._model, runner=self._runners[span])
        self._servers.network.kill(self._servers.handlers[span].transport.peer)


class EndFirst(LogitsProcessor):
    """Ends the first prompt's text early, whatever the model would write."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if input_ids.shape[1] == PROMPTS.shape[1] + ENDS_AFTER:
            scores = scores.clone()
            scores[:NUM_BEAMS] -= UNLIKELY
            scores[:NUM_BEAMS, END] += 2 * UNLIKELY
        return scores


class LoseServers(LogitsProcessor):
    """Between two steps."""

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if (span := LOSSES.get(input_ids.shape[1] - PROMPTS.shape[1])) is not None:
            self._connection.run(self._connection.lose(span))
        return scores


def write(model: Any, *processors: LogitsProcessor) -> torch.Tensor:
    tokens = model.generate(
        PROMPTS, attention_mask=PADDED, num_beams=NUM_BEAMS, max_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=PAD, eos_token_id=END, early_stopping=True,
        logits_processor=LogitsProcessorList([EndFirst(), *processors]),
    )  # fmt: skip
    return tokens[:, PROMPTS.shape[1] :]


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
def test_beams_are_the_local_models_through_losses_while_one_prompt_ends_early(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers: list[list[int]] = []
    gather = Session.gather
    monkeypatch.setattr(Session, "gather", lambda self, rows: (gathers.append(list(rows)), gather(self, rows)))
    directory = write_tiny(tmp_path, family)
    text = write(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    assert (text == END).sum(1).tolist() == [NEW_TOKENS - ENDS_AFTER, 0]
    checkpoint = open_checkpoint(directory)
    connection = MemoryConnection(checkpoint)
    model = load_distributed_model(checkpoint, connection, dtype=None, model_name=None)
    try:
        with model.inference_session(max_length=64) as session:
            written = write(model, LoseServers(connection))
            assert recoveries_of(session) >= len(LOSSES)
    finally:
        connection.close()
    assert torch.equal(written, text)
    assert any(rows != sorted(set(rows)) for rows in gathers), "no beam was thrown away, so nothing was tried"


def recoveries_of(session: Any) -> int:
    return session._session.recoveries
