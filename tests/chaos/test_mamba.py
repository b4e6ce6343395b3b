"""A real family that takes several positions only as the first loses servers, and one leaves: the text is the same.

What is replayed goes by what its code can; cut like another family's, it gives other text, and says nothing of it.
"""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.session import Session
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.tensors import to_torch, to_wire
from corolla.models.testing import write_tiny
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.server.runner import SpanRunner
from corolla.server.span import TorchSpanRunner
from corolla.wire.tensors import WireTensor

SPANS = ("0:3", "3:6")
HIDDEN_SIZE = 64
KILL_AT, NUM_STEPS, MAX_STEPS = 16, 24, 120
FAR = LinkConditions(0.2)
"""So that a substitute hears much only after it has stood by for a while."""
SHORT = SessionLimits(max_chunk_tokens=8)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpanRunner]:
    opened = open_checkpoint(write_tiny(tmp_path_factory.mktemp("tiny"), "mamba"))
    return {span: TorchSpanRunner(load_span(opened, *map(int, span.split(":")))) for span in SPANS}


@pytest.fixture(scope="module")
def undisturbed(runners: dict[str, SpanRunner]) -> list[torch.Tensor]:
    return write(runners, SessionLimits(), num_steps=MAX_STEPS)


def write(
    runners: dict[str, SpanRunner], limits: SessionLimits, *, num_steps: int, kills: str = "", leaves: str = ""
) -> list[torch.Tensor]:
    """What came back for each step, each made of what came back before. On the way another server takes a place."""

    async def told() -> list[torch.Tensor]:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.01)) as swarm:
            for span in SPANS:
                await swarm.serve(span, span, runner=runners[span], limits=limits)
            client = await swarm.client("client")
            leaving: asyncio.Task[None] | None = None
            async with client.open_session(swarm.model, max_tokens=2 * MAX_STEPS) as session:
                outputs = [await step(session, prompt())]
                while len(outputs) < num_steps or (leaving is not None and not leaving.done()):
                    if len(outputs) == KILL_AT and (span := kills or leaves):
                        another = await swarm.serve("another", span, runner=runners[span], limits=limits)
                        swarm.network.set_conditions(client.own_peer, another.transport.peer, FAR)
                        if kills:
                            swarm.network.kill(swarm.network.transport(span).peer)
                        else:
                            leaving = asyncio.create_task(swarm.leave(span))
                    outputs.append(await step(session, torch.tanh(outputs[-1])))
                outputs.append(await step(session, torch.tanh(outputs[-1])))
                assert session.recoveries == (1 if kills or leaves else 0)
                return outputs

    return run_virtual(told())


async def step(session: Session, hidden: torch.Tensor) -> torch.Tensor:
    output = await session.step(to_wire(hidden), num_tokens=hidden.shape[1], want="last")
    assert isinstance(output, WireTensor)
    return to_torch(output)


def prompt() -> torch.Tensor:
    return torch.randn(1, 6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("limits", [SessionLimits(), SHORT], ids=["all at once", "too long for one step"])
@pytest.mark.parametrize("killed", SPANS)
def test_mamba_gives_the_same_text_when_a_server_is_killed(
    runners: dict[str, SpanRunner], undisturbed: list[torch.Tensor], limits: SessionLimits, killed: str
) -> None:
    assert_same(write(runners, limits, num_steps=NUM_STEPS, kills=killed), undisturbed)


@pytest.mark.parametrize("leaving", SPANS)
def test_mamba_gives_the_same_text_when_a_server_leaves(
    runners: dict[str, SpanRunner], undisturbed: list[torch.Tensor], leaving: str
) -> None:
    assert_same(write(runners, SessionLimits(), num_steps=NUM_STEPS, leaves=leaving), undisturbed)


def assert_same(outputs: list[torch.Tensor], undisturbed: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.cat(outputs), torch.cat(undisturbed[: len(outputs)]), rtol=1e-4, atol=1e-4)
