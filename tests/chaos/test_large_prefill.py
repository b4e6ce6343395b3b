"""A prompt of more than 4 MiB in one step goes from server to server, and nothing of it takes another way.

The predecessor's pushes failed above that size, and nobody said so. Here once in memory, once through real daemons.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm, join_swarm
from corolla.ids import Fingerprint
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport
from corolla.net.memory.loop import run_virtual
from corolla.server.config import ServerConfig
from corolla.server.executor import InlineExecutor
from corolla.server.handler import Handler
from corolla.server.runner import SessionCache, SpanFacts
from corolla.server.serving import ServedSpan, serve_span
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

HIDDEN_SIZE = 2048
NUM_TOKENS = 1536
NUM_BYTES = NUM_TOKENS * HIDDEN_SIZE * 4
assert NUM_BYTES > 4 << 20
BLOCKS_EACH = 2
SPANS = range(3)
MODEL = ServedModel("wide", Fingerprint(f"{1:032x}"), BLOCKS_EACH * len(SPANS))


class ReversingSpan:
    """Gives the bytes of its input in reverse order, all of them: three of them give them in reverse."""

    def __init__(self, start: int) -> None:
        self.facts = SpanFacts(start, start + BLOCKS_EACH, HIDDEN_SIZE, "float32")

    def new_cache(self, start: int, end: int, max_tokens: int) -> SessionCache:
        return NoCache()

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        return WireTensor(step.hidden.dtype, step.hidden.shape, bytes(step.hidden.data)[::-1])


class NoCache:
    num_tokens = 0


async def assert_it_goes_round(client: Swarm, handlers: Sequence[Handler]) -> None:
    """One step, there and back; each server has it from the one before."""
    # Any 4 bytes below 0x7f are finite floats, forwards and backwards.
    data = bytes(byte & 0x3F for byte in random.Random(1).randbytes(NUM_BYTES))
    upstreams = [client.own_peer, *(handler.transport.peer for handler in handlers)]
    async with client.open_session(MODEL, max_tokens=NUM_TOKENS) as session:
        output = await session.step(
            WireTensor("float32", (1, NUM_TOKENS, HIDDEN_SIZE), data), num_tokens=NUM_TOKENS, want="all"
        )
        assert output is not None
        assert bytes(output.data) == data[::-1]
        assert session.through_client == []
        assert session.recoveries == 0
        for handler, upstream in zip(handlers, upstreams, strict=False):
            (hosted,) = handler.sessions.values()
            assert hosted.state.upstream == upstream
            assert handler.counters.steps == 1


def test_in_memory() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=MODEL.num_blocks) as swarm:
            swarm.model = MODEL
            handlers = [
                await swarm.serve(f"server {n}", f"{2 * n}:{2 * n + 2}", runner=ReversingSpan(2 * n)) for n in SPANS
            ]
            await assert_it_goes_round(await swarm.client("client"), handlers)

    run_virtual(told())


@asynccontextmanager
async def libp2p_swarm() -> AsyncIterator[tuple[Swarm, list[Handler]]]:
    """Three servers and a client, each with a daemon of its own."""
    async with AsyncExitStack() as stack:
        handlers: list[Handler] = []
        addresses: list[str] = []
        for number in SPANS:
            transport = await stack.enter_async_context(open_transport(NetworkConfig()))
            if addresses:
                await transport.join(addresses, timeout_s=30)
            addresses = addresses or list(transport.addresses)
            served = ServedSpan(MODEL.name, MODEL.fingerprint, MODEL.num_blocks, 1000.0, 1000.0)
            config = ServerConfig(model=Path("wide"), drain_timeout_s=1)
            runner = ReversingSpan(number * BLOCKS_EACH)
            handlers.append(
                await stack.enter_async_context(serve_span(transport, runner, InlineExecutor(), config, served))
            )
        transport = await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))
        yield await stack.enter_async_context(join_swarm(transport, addresses)), handlers


@pytest.mark.slow
def test_through_libp2p() -> None:
    async def told() -> None:
        async with libp2p_swarm() as (client, handlers):
            await assert_it_goes_round(client, handlers)

    asyncio.run(told())
