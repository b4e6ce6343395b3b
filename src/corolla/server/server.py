"""Assembles a server: network, span, sessions, announcement; and takes it apart again in the right order.

The daemon starts and joins while torch is imported and the span is loaded: on a small model those are most of
the time until `ready`. Nothing is announced before the span has passed its self-test.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from corolla import __version__
from corolla.errors import BadInput, SwarmError
from corolla.ids import Fingerprint, PeerId
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.net.libp2p import NetworkConfig, open_transport
from corolla.net.streams import Transport
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.executor import DeviceThread, Executor
from corolla.server.handler import Handler
from corolla.server.kv import CachePool
from corolla.server.runner import SpanRunner
from corolla.swarm.announcement import Announcement, clean_name

if TYPE_CHECKING:
    from corolla.models.span import Span

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What a server says of itself when it answers requests."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedSpan:
    """What an announcement says of the blocks, beside what changes from minute to minute."""

    model_name: str
    fingerprint: Fingerprint
    num_blocks: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


async def run_server(
    config: ServerConfig,
    network: NetworkConfig,
    initial_peers: Sequence[str],
    *,
    stop: asyncio.Event,
    on_ready: Callable[[Ready], None],
) -> None:
    """Host a span until `stop` is set. Raises BadInput, NoPeers, or SwarmError when the network is lost."""
    checkpoint = open_checkpoint(config.model)
    start, end = _span_of(config, checkpoint)
    which = fingerprint(checkpoint)
    loading = asyncio.create_task(asyncio.to_thread(_load, config, checkpoint, start, end))
    try:
        async with open_transport(network) as transport:
            if initial_peers:
                await transport.join(initial_peers, timeout_s=JOIN_TIMEOUT_S)
            span, speed = await loading
            from corolla.server.span import TorchSpanRunner

            served = ServedSpan(config.model_name or checkpoint.name, which, checkpoint.num_blocks, *speed)
            config = _within_model(config, checkpoint)
            executor = DeviceThread()
            async with serve_span(transport, TorchSpanRunner(span), executor, config, served):
                on_ready(Ready(transport.peer, start, end, tuple(transport.addresses)))
                await _until(stop, transport)
    finally:
        loading.cancel()


@asynccontextmanager
async def serve_span(
    transport: Transport, runner: SpanRunner, executor: Executor, config: ServerConfig, served: ServedSpan
) -> AsyncIterator[Handler]:
    """Answer requests on an open transport, announced, for as long as the block lasts."""
    pool = CachePool(config.cache_tokens)
    handler = Handler(
        transport, runner, executor, pool,
        fingerprint=served.fingerprint, limits=config.limits, liveness=config.liveness,
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
    )


async def _until(stop: asyncio.Event, transport: Transport) -> None:
    """Return when told to stop; raise when the network is gone."""
    stopped = asyncio.ensure_future(stop.wait())
    lost = asyncio.ensure_future(transport.wait_lost())
    try:
        await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done() and not stopped.done():
            raise SwarmError(f"the network daemon is gone: {lost.result()}")
    finally:
        stopped.cancel()
        lost.cancel()


def _span_of(config: ServerConfig, checkpoint: Checkpoint) -> tuple[int, int]:
    start, end = config.blocks or (0, checkpoint.num_blocks)
    if not 0 <= start < end <= checkpoint.num_blocks:
        raise BadInput(
            f"--blocks {start}:{end} is not a span of {checkpoint.name}: it has blocks 0:{checkpoint.num_blocks}, "
            "and a span A:B needs 0 ≤ A < B ≤ " + str(checkpoint.num_blocks)
        )
    return start, end


def _within_model(config: ServerConfig, checkpoint: Checkpoint) -> ServerConfig:
    """No session may be longer than the model knows positions, nor than the whole cache."""
    longest = min(
        config.limits.max_session_tokens,
        config.cache_tokens,
        checkpoint.max_positions or config.limits.max_session_tokens,
    )
    return replace(config, limits=replace(config.limits, max_session_tokens=longest))


def _load(config: ServerConfig, checkpoint: Checkpoint, start: int, end: int) -> "tuple[Span, tuple[float, float]]":
    """The span and its speed (decode, prefill: tokens a second); runs beside the network's start."""
    from corolla.models.loading import resolve_dtype
    from corolla.models.span import load_span
    from corolla.server.speed import measure_speed

    began = time.perf_counter()
    span = load_span(checkpoint, start, end, dtype=resolve_dtype(config.dtype), device=config.device)
    speed = measure_speed(span)
    log.info("span loaded", extra={"blocks": f"{start}:{end}", "seconds": round(time.perf_counter() - began, 1)})
    return span, speed
