"""Moves a server that serves to other blocks, when the swarm would be better for it; its clients lose nothing.

    load first    load the new blocks beside the old ones → serve them → clients move away from the old ones
    leave first   clients move away → let the old blocks go → load the new ones → serve them (no memory for both)

When to move is decided in `placing.py`. From the decision until the new blocks are served, the announcement claims
them (`joining`): nobody else goes there, and no new session comes here. A load that fails leaves the server where it
was.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.server.handler import Handler
from corolla.server.placing import PlacingConfig, keep_placed
from corolla.server.runner import SessionCache, SpanFacts, SpanRunner
from corolla.swarm.cost import CostModel
from corolla.swarm.view import View
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""Between attempts to load the old blocks again, after the new ones could not be had."""
LOAD_FAULTS: Final = (SwarmError, OSError, RuntimeError, MemoryError)
"""What a load can fail with: no such file, a damaged one, no memory."""

Order = Literal["load_first", "leave_first"]


class Loader(Protocol):
    """Loads blocks of the model that is served."""

    async def load(self, span: range) -> tuple[SpanRunner, tuple[float, float]]:
        """The blocks, tried out, and their speed. Raises one of `LOAD_FAULTS`."""
        ...

    def order(self, num_blocks: int) -> Order:
        """Whether so many blocks more fit into the memory that is free now."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A server's freedom to choose its blocks."""

    loader: Loader
    cuts: frozenset[int] | None = None
    """Borders at which the model can be cut; None: all."""
    cost: CostModel = field(default_factory=CostModel)
    config: PlacingConfig = field(default_factory=PlacingConfig)
    rng: random.Random = field(default_factory=random.Random)


@dataclass(slots=True)
class Claim:
    """Where a server is about to go; what it announces follows this."""

    span: range | None = None


class Mover:
    """One server's moves; `placing.Publisher` of its claims."""

    def __init__(
        self,
        handler: Handler,
        claim: Claim,
        read: Callable[[], Awaitable[View]],
        announce: Callable[[], Awaitable[bool]],
        placement: Placement,
        *,
        drain_timeout_s: float,
    ) -> None:
        """`announce`: publish at once what `claim` says, or else what is served."""
        self._handler = handler
        self._claim = claim
        self._read = read
        self._announce = announce
        self._placement = placement
        self._drain_timeout_s = drain_timeout_s

    async def keep_placed(self, own: PeerId) -> None:
        """Look again and again whether to move, and do. Until cancelled."""
        placement = self._placement
        await keep_placed(
            self, own, self.move, cuts=placement.cuts, cost=placement.cost, rng=placement.rng, config=placement.config
        )

    async def read(self) -> View:
        return await self._read()

    async def claim(self, span: range) -> None:
        self._claim.span = span
        await self._announce()

    async def stay(self) -> None:
        self._claim.span = None
        await self._announce()

    async def move(self, span: range) -> None:
        """Go to these blocks; back where it was when they cannot be loaded."""
        facts = self._handler.runner.facts
        order = self._placement.loader.order(len(span))
        log.info("moving from blocks %s:%s to %s:%s, %s", facts.start, facts.end, span.start, span.stop, order)
        self._claim.span = span
        await (self._load_first(span) if order == "load_first" else self._leave_first(span, facts))

    async def _load_first(self, span: range) -> None:
        try:
            runner, speed = await self._placement.loader.load(span)
        except LOAD_FAULTS as failed:
            log.warning("the new blocks cannot be loaded, so this server stays: %s", failed)
            await self.stay()
            return
        self._handler.host(runner, speed)
        await self.stay()  # at the new blocks
        await self._handler.let_go(self._drain_timeout_s)

    async def _leave_first(self, span: range, old: SpanFacts) -> None:
        self._handler.is_away = True
        await self._announce()  # no new session comes to blocks that are given up
        await self._handler.let_go(self._drain_timeout_s)
        await self._handler.executor.call(lambda: None)  # behind every step that still ran on the old blocks
        self._handler.host(Vacant(old), (0.0, 0.0))  # nothing holds them any more
        try:
            runner, speed = await self._placement.loader.load(span)
        except LOAD_FAULTS as failed:
            log.warning("the new blocks cannot be loaded, so the old ones are again: %s", failed)
            runner, speed = await self._load_again(range(old.start, old.end))
        self._handler.host(runner, speed)
        self._handler.is_away = False
        await self.stay()

    async def _load_again(self, span: range) -> tuple[SpanRunner, tuple[float, float]]:
        """They were here a moment ago; whatever hinders that now may pass."""
        self._claim.span = span
        while True:
            try:
                return await self._placement.loader.load(span)
            except LOAD_FAULTS as failed:
                log.warning("the old blocks cannot be loaded, trying again in %g s: %s", RETRY_S, failed)
                await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class Vacant:
    """Stands where a span was while the next one loads. Nothing reaches it: no session is taken meanwhile."""

    facts: SpanFacts

    def new_cache(self, start: int, end: int, max_tokens: int) -> SessionCache:
        raise AssertionError("a session on a server that hosts nothing")

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        raise AssertionError("a step on a server that hosts nothing")
