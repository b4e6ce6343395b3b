"""Servers and clients of the real code on the in-memory network, with toy spans in place of tensors.

    async with MemorySwarm(num_blocks=8) as swarm:
        await swarm.serve("a", "0:4")
        await swarm.serve("b", "4:8")
        client = await swarm.client("c")
        async with client.open_session(swarm.model, max_tokens=64) as session: ...

For `corolla.net.memory.loop.run_virtual`: minutes of swarm life pass in milliseconds.
"""

import random
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from corolla.apps.sim.toy import ToySpan
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm
from corolla.ids import Fingerprint
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.server.config import ServerConfig, SessionLimits
from corolla.server.executor import Executor, InlineExecutor
from corolla.server.handler import Handler
from corolla.server.moving import Placement
from corolla.server.runner import SpanRunner
from corolla.server.serving import ServedSpan, serve_span

SPEED = (1000.0, 1000.0)
"""Tokens a second that each server says it computes: decode, prefill."""


class MemorySwarm:
    """One bootstrap peer, and whoever is asked to join. Everything ends with the block."""

    def __init__(self, *, num_blocks: int, seed: int = 0, conditions: LinkConditions | None = None) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self.network = MemoryNetwork(self.rng, conditions)
        self.model = ServedModel("toy", Fingerprint(f"{num_blocks:032x}"), num_blocks)
        self.handlers: dict[str, Handler] = {}
        self._stack = AsyncExitStack()
        self._servers: dict[str, AsyncExitStack] = {}
        self._bootstrap = self.network.transport("bootstrap")

    async def __aenter__(self) -> "MemorySwarm":
        await self._stack.enter_async_context(self._bootstrap)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def serve(
        self, name: str, span: str, *, limits: SessionLimits | None = None, cache_tokens: int = 4096,
        model: ServedModel | None = None, quantization: str | None = None, runner: SpanRunner | None = None,
        executor: Executor | None = None, placement: Placement | None = None,
    ) -> Handler:  # fmt: skip
        """A server of blocks `A:B`, announced when this returns. `runner`: what computes; a toy if left out.

        `executor`: where it does; at once and on the loop if left out. `placement`: how it may move; if left out, not.
        """
        start, end = (int(edge) for edge in span.split(":"))
        own = self._servers[name] = await self._stack.enter_async_context(AsyncExitStack())
        transport = await own.enter_async_context(self.network.transport(name))
        await transport.join(self._bootstrap.addresses, timeout_s=5)
        config = ServerConfig(model=Path(name), name=name, cache_tokens=cache_tokens, limits=limits or SessionLimits())
        model = model or self.model
        served = ServedSpan(model.name, model.fingerprint, model.num_blocks, *SPEED, quantization=quantization)
        handler = await own.enter_async_context(
            serve_span(
                transport,
                runner or ToySpan(start, end),
                executor or InlineExecutor(),
                config,
                served,
                rng=self.rng,
                placement=placement,
            )
        )
        self.handlers[name] = handler
        return handler

    async def leave(self, name: str) -> None:
        """The server takes its announcement back, drains and ends, as on SIGTERM."""
        await self._servers.pop(name).aclose()

    async def move(self, name: str, runner: SpanRunner, *, timeout_s: float, leaves_first: bool) -> None:
        """The server goes to other blocks (`server/moving.py`, whose decisions are left out), and lets clients go.

        `leaves_first`: it has no room for both spans, and hosts nothing in between.
        """
        handler = self.handlers[name]
        handler.is_away = leaves_first
        if not leaves_first:
            handler.host(runner, SPEED)
        await handler.let_go(timeout_s)
        if leaves_first:
            handler.host(runner, SPEED)
            handler.is_away = False

    async def client(self, name: str, config: ClientConfig | None = None) -> Swarm:
        swarm = Swarm(await self.join(name, is_client=True), config or ClientConfig(), rng=self.rng)
        self._stack.push_async_callback(swarm.close)
        return swarm

    async def join(self, name: str, *, is_client: bool = False) -> MemoryTransport:
        """A peer that has met the others, and is there until the swarm ends or it is killed."""
        transport = await self._stack.enter_async_context(self.network.transport(name, is_client=is_client))
        await transport.join(self._bootstrap.addresses, timeout_s=5)
        return transport
