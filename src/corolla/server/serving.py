"""Answers requests on an open transport and keeps announced what is served. No torch, any transport."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from corolla import __version__
from corolla.clock import loop_time
from corolla.errors import SwarmError
from corolla.ids import Fingerprint
from corolla.net.streams import Transport
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.executor import Executor
from corolla.server.followers import Followers
from corolla.server.handler import Handler
from corolla.server.kv import CachePool
from corolla.server.moving import Claim, Mover, Placement
from corolla.server.neighbours import Neighbours
from corolla.server.publisher import Lifetimes, read_living
from corolla.server.runner import SpanRunner
from corolla.swarm.announcement import MAX_ADDRESSES, Announcement, State, clean_name
from corolla.swarm.watch import Watcher
from corolla.wire.tensors import ITEM_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedSpan:
    """What an announcement says of the blocks, beside what changes from minute to minute."""

    model_name: str
    fingerprint: Fingerprint
    num_blocks: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    quantization: str | None = None
    commit: str | None = None
    """Of the hub's repository that the weights came from; None: they are from elsewhere."""


@asynccontextmanager
async def serve_span(
    transport: Transport, runner: SpanRunner, executor: Executor, config: ServerConfig, served: ServedSpan, *,
    rng: random.Random | None = None, placement: Placement | None = None,
    on_broken: Callable[[SwarmError], None] = lambda _broken: None,
) -> AsyncIterator[Handler]:  # fmt: skip
    """Answer requests on an open transport, announced, while the block lasts.

    `rng` spreads what is periodic. `placement`: the server may move to other blocks; None: it stays. `on_broken`: told
    when what keeps the server announced, measured or placed has failed: nobody would find it any more.
    """
    pool = CachePool(config.cache_tokens)
    watcher = Watcher(transport, served.fingerprint, num_blocks=served.num_blocks)
    handler = Handler(
        transport, runner, executor, pool,
        fingerprint=served.fingerprint, limits=config.limits, liveness=config.liveness,
        may_dial=Neighbours(watcher).may_dial, speed=(served.decode_tokens_per_s, served.prefill_tokens_per_s),
        listed=config.listed,
    )  # fmt: skip
    handler.counters.announcements_rejected = watcher.rejected
    followers = Followers(
        transport, watcher, lambda: range(handler.runner.facts.start, handler.runner.facts.end), rng=rng
    )
    claim = Claim()
    idle = announcement_of(
        transport, config, served,
        state="online", span=range(0), dtype=runner.facts.dtype, is_movable=placement is not None,
    )  # fmt: skip
    announcer = Announcer(
        transport,
        lambda: _announcement(idle, transport, handler, followers, claim, watcher),
        period_s=config.announce_period_s,
        lifetime_s=config.record_lifetime_s,
        view=lambda: watcher.view,
        rng=rng,
    )
    work = {"keep_announced": announcer.keep_announced, "keep_measured": followers.keep_measured}
    if placement is not None:
        read = partial(read_living, transport, watcher, Lifetimes(config.announce_period_s, config.record_lifetime_s))
        mover = Mover(handler, claim, read, announcer.announce, placement, drain_timeout_s=config.drain_timeout_s)
        work["keep_placed"] = partial(mover.keep_placed, transport.peer)
    keepers: list[asyncio.Task[None]] = []
    try:
        await handler.start()
        if not await announcer.announce():
            log.warning("the announcement is not kept by any other peer yet")
        keepers += [asyncio.create_task(keep(), name=name) for name, keep in work.items()]
        for keeper in keepers:
            keeper.add_done_callback(partial(_tell_failure, on_broken))
        yield handler
    finally:
        for keeper in keepers:
            keeper.cancel()
        handler.is_leaving = True
        if handler.sessions:
            await announcer.announce()  # as draining: nobody takes it for a new session while there is another
            await handler.drain(config.drain_timeout_s)
        await announcer.withdraw()
        await handler.close()
        await executor.close()


def _tell_failure(on_broken: Callable[[SwarmError], None], keeper: "asyncio.Task[None]") -> None:
    if not keeper.cancelled() and (failure := keeper.exception()) is not None:
        what = keeper.get_name()
        log.error("a task that should never end has failed: %s", what, exc_info=failure)
        on_broken(SwarmError(f"{what} has failed ({type(failure).__name__}); without it this server is of no use"))


def _announcement(
    idle: Announcement, transport: Transport, handler: Handler, followers: Followers, claim: Claim, watcher: Watcher
) -> Announcement:
    """What an idle server would announce, as it is now. Cheap: it is looked at each second."""
    facts = handler.runner.facts
    state, span, moving_to = "online", range(facts.start, facts.end), None
    if handler.is_leaving:
        state = "draining"
    elif claim.span is not None and handler.is_away:
        state, span = "joining", claim.span
    elif claim.span is not None:
        moving_to = claim.span.start, claim.span.stop
    return msgspec.structs.replace(
        idle,
        state=state,
        start=span.start,
        end=span.stop,
        moving_to=moving_to,
        dtype=facts.dtype,
        position_bytes=facts.hidden_size * ITEM_BYTES[facts.dtype],
        announced_at=transport.wall_time(),
        decode_tokens_per_s=handler.meter.decode_tokens_per_s,
        prefill_tokens_per_s=handler.meter.prefill_tokens_per_s,
        free_cache_tokens=handler.pool.free_tokens,
        queue_s=handler.queue_s,
        next_rtts=followers.next_rtts,
        inflows=handler.inflows.to_announce(watcher.view.servers, loop_time()),
    )


def announcement_of(
    transport: Transport, config: ServerConfig, served: ServedSpan, *, state: State, span: range, dtype: str,
    is_movable: bool,
) -> Announcement:  # fmt: skip
    """What a server that has nothing to do yet announces."""
    return Announcement(
        state=state,
        start=span.start,
        end=span.stop,
        num_blocks=served.num_blocks,
        fingerprint=served.fingerprint,
        model_name=clean_name(served.model_name),
        dtype=dtype,
        quantization=served.quantization,
        decode_tokens_per_s=served.decode_tokens_per_s,
        prefill_tokens_per_s=served.prefill_tokens_per_s,
        free_cache_tokens=config.cache_tokens,
        max_session_tokens=config.limits.max_session_tokens,
        version=__version__,
        name=clean_name(config.name),
        addresses=list(transport.addresses)[:MAX_ADDRESSES],
        announced_at=transport.wall_time(),
        commit=served.commit or "",
        is_movable=is_movable,
    )
