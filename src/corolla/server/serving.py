"""Answers requests on an open transport and keeps announced what is served. No torch, any transport."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from corolla import __version__
from corolla.ids import Fingerprint
from corolla.net.streams import Transport
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.executor import Executor
from corolla.server.handler import Handler
from corolla.server.kv import CachePool
from corolla.server.neighbours import Neighbours
from corolla.server.runner import SpanRunner
from corolla.swarm.announcement import MAX_ADDRESSES, Announcement, clean_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedSpan:
    """What an announcement says of the blocks, beside what changes from minute to minute."""

    model_name: str
    fingerprint: Fingerprint
    num_blocks: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


@asynccontextmanager
async def serve_span(
    transport: Transport, runner: SpanRunner, executor: Executor, config: ServerConfig, served: ServedSpan
) -> AsyncIterator[Handler]:
    """Answer requests on an open transport, announced, for as long as the block lasts."""
    pool = CachePool(config.cache_tokens)
    handler = Handler(
        transport, runner, executor, pool,
        fingerprint=served.fingerprint, limits=config.limits, liveness=config.liveness,
        may_dial=Neighbours(transport, served.fingerprint).may_dial,
    )  # fmt: skip
    announcer = Announcer(
        transport,
        lambda: _announcement(transport, handler, config, served),
        period_s=config.announce_period_s,
        lifetime_s=config.record_lifetime_s,
    )
    await handler.start()
    if not await announcer.announce():
        log.warning("the announcement is not kept by any other peer yet")
    keeper = asyncio.create_task(announcer.keep_announced())
    try:
        yield handler
    finally:
        keeper.cancel()
        handler.is_leaving = True
        await announcer.withdraw()
        await handler.close()
        await executor.close()


def _announcement(transport: Transport, handler: Handler, config: ServerConfig, served: ServedSpan) -> Announcement:
    facts = handler.runner.facts
    return Announcement(
        state="draining" if handler.is_leaving else "online",
        start=facts.start,
        end=facts.end,
        num_blocks=served.num_blocks,
        fingerprint=served.fingerprint,
        model_name=clean_name(served.model_name),
        dtype=facts.dtype,
        decode_tokens_per_s=served.decode_tokens_per_s,
        prefill_tokens_per_s=served.prefill_tokens_per_s,
        free_cache_tokens=handler.pool.free_tokens,
        queue_s=handler.queue_s,
        max_session_tokens=config.limits.max_session_tokens,
        version=__version__,
        name=clean_name(config.name),
        addresses=list(transport.addresses)[:MAX_ADDRESSES],
        announced_at=transport.wall_time(),
    )
