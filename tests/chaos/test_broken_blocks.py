"""Real blocks whose weights turn to NaN in the middle of a text: their server says so, and another goes on with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from corolla.apps.sim.swarm import MemorySwarm
from corolla.clock import loop_time
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.span import Span
from corolla.models.tensors import to_torch, to_wire
from corolla.models.testing import write_tiny
from corolla.net.memory.loop import run_virtual
from corolla.server.span import TorchSpanRunner

SPANS = ("0:2", "2:4", "4:6")
NUM_STEPS = 8
BROKEN_AT = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("broken"), "llama")


def load(checkpoint: Path, blocks: str) -> Span:
    start, end = map(int, blocks.split(":"))
    return load_span(open_checkpoint(checkpoint), start, end, dtype=torch.float32)


def break_blocks(span: Span) -> None:
    with torch.no_grad():
        for block in span.blocks:
            for parameter in block.parameters():
                parameter.fill_(torch.nan)


def write(spans: dict[str, Span], hidden_size: int, broken: Span | None = None) -> tuple[list[torch.Tensor], set[str]]:
    """Single positions, each made of what came back for the one before; and the names of servers banned meanwhile."""

    async def told() -> tuple[list[torch.Tensor], set[str]]:
        async with MemorySwarm(num_blocks=6) as swarm:
            for blocks, span in spans.items():
                await swarm.serve(blocks, blocks, runner=TorchSpanRunner(broken if blocks == place else span))
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=32) as session:
                entry, outputs = torch.ones(1, 1, hidden_size), list[torch.Tensor]()
                for number in range(NUM_STEPS):
                    if broken is not None and number == BROKEN_AT:
                        assert place is not None
                        await swarm.serve("other", place, runner=TorchSpanRunner(spans[place]))
                        break_blocks(broken)
                    output = await session.step(to_wire(entry), num_tokens=1, want="last")
                    assert output is not None
                    outputs.append(to_torch(output).clone())
                    entry = torch.tanh(outputs[-1])
                banned = client.router(swarm.model).book.banned(loop_time())
            return outputs, {name for name, handler in swarm.handlers.items() if handler.transport.peer in banned}

    place = None if broken is None else f"{broken.start}:{broken.end}"
    return run_virtual(told())


@pytest.mark.parametrize("place", SPANS)
def test_the_text_is_the_same_and_only_that_server_is_banned(checkpoint: Path, place: str) -> None:
    spans = {blocks: load(checkpoint, blocks) for blocks in SPANS}
    hidden_size = next(iter(spans.values())).hidden_size
    whole, nobody = write(spans, hidden_size)
    lossy, banned = write(spans, hidden_size, load(checkpoint, place))
    torch.testing.assert_close(lossy, whole, rtol=0, atol=1e-5)
    assert (nobody, banned) == (set(), {place})
