"""Assembles a server: network, span, sessions, announcement; and takes it apart again in the right order.

The daemon starts and joins while torch is imported and the span is loaded: on a small model those are most of
the time until `ready`. Nothing is announced before the span has passed its self-test.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from corolla.errors import BadInput, SwarmError
from corolla.ids import PeerId
from corolla.models.checkpoint import Checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.source import open_model_source
from corolla.models.transfer import Transfer
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport
from corolla.net.reachable import check_reachable
from corolla.net.streams import Transport
from corolla.server.config import ServerConfig
from corolla.server.device import check_device, free_memory_bytes
from corolla.server.executor import DeviceThread
from corolla.server.memory import HEADROOM_SHARE, LEAST_HEADROOM_BYTES, MemoryPlan
from corolla.server.serving import ServedSpan, serve_span

if TYPE_CHECKING:
    from corolla.models.span import Span

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
TELL_AFTER_S = 2.0
TELL_EVERY_S = 5.0


class TellTransfer:
    """Says how a download goes, when it takes long enough for somebody to wonder."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def __call__(self, transfer: Transfer) -> None:
        now = time.monotonic()
        if transfer.seconds > TELL_AFTER_S and now - self._told_at > TELL_EVERY_S:
            self._told_at = now
            log.info("%s", transfer)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a server says of itself when it answers requests."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...]


async def run_server(
    config: ServerConfig,
    network: NetworkConfig,
    initial_peers: Sequence[str],
    *,
    stop: asyncio.Event,
    on_ready: Callable[[Ready], None],
) -> None:
    """Host a span until `stop` is set. Raises BadInput, NoPeers, or SwarmError when the network is lost."""
    check_device(config.device)
    checkpoint = await asyncio.to_thread(
        open_model_source, config.model, config.source, say=log.info, progress=TellTransfer()
    )
    start, end = _span_of(config, checkpoint)
    which = await asyncio.to_thread(fingerprint, checkpoint)  # of a hub's model, it reads some of its bytes
    loading = asyncio.create_task(asyncio.to_thread(_load, config, checkpoint, start, end))
    try:
        async with open_transport(network) as transport:
            if initial_peers:
                await transport.join(initial_peers, timeout_s=JOIN_TIMEOUT_S)
                await _require_reachable(transport)
            span, speed = await loading
            from corolla.server.span import TorchSpanRunner

            served = ServedSpan(
                config.model_name or checkpoint.name, which, checkpoint.num_blocks, *speed,
                quantization=None if config.quantization == "none" else config.quantization, commit=checkpoint.commit,
            )  # fmt: skip
            config = _within_model(config, checkpoint)
            executor = DeviceThread()
            async with serve_span(transport, TorchSpanRunner(span), executor, config, served):
                on_ready(Ready(transport.peer, start, end, tuple(transport.addresses)))
                await _until(stop, transport)
    finally:
        loading.cancel()


async def _require_reachable(transport: Transport) -> None:
    """A server that nobody can dial would only be in the way: do not announce it, say why and what to do."""
    finding = await check_reachable(transport)
    log.info("%s", finding.text)
    if finding.state == "bad":
        raise SwarmError(f"{finding.text}; {finding.next_step}")


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
    from corolla.models.loading import load_span
    from corolla.models.tensors import TORCH_DTYPES
    from corolla.server.speed import measure_speed

    began = time.perf_counter()
    free_bytes = free_memory_bytes(config.device)
    dtype = None if config.dtype == "auto" else TORCH_DTYPES[config.dtype]
    span = load_span(checkpoint, start, end, dtype=dtype, device=config.device, quantization=config.quantization)
    _tell_memory(span, checkpoint, config, free_bytes)
    speed = measure_speed(span)
    log.info("span loaded", extra={"blocks": f"{start}:{end}", "seconds": round(time.perf_counter() - began, 1)})
    return span, speed


def _tell_memory(span: "Span", checkpoint: Checkpoint, config: ServerConfig, free_bytes: int) -> None:
    """Say in one line what hosting takes, and warn when the cache, once full, would not fit."""
    can = span.capabilities
    cache_bytes = config.cache_tokens * can.cache_bytes_per_token
    plan = MemoryPlan(
        num_blocks=span.num_blocks,
        of_blocks=checkpoint.num_blocks,
        free_bytes=free_bytes,
        weights_bytes=span.weight_bytes,
        cache_bytes=cache_bytes,
        headroom_bytes=max(int(HEADROOM_SHARE * free_bytes), LEAST_HEADROOM_BYTES),
        cache_tokens=config.cache_tokens,
    )
    log.info(plan.sentence)
    if span.weight_bytes + cache_bytes > free_bytes:
        log.warning("a full cache would not fit into the free memory: serve fewer blocks, or pass --cache-tokens")
