"""Assembles a server: network, span, sessions, announcement; and takes it apart again in the right order.

The daemon starts and joins while torch is imported and the span is loaded: on a small model those are most of
the time until `ready`. Nothing is announced before the span has passed its self-test.
"""

import asyncio
import gc
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from corolla.errors import SwarmError
from corolla.ids import Fingerprint, PeerId
from corolla.models.checkpoint import Checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.frugal import import_modeling
from corolla.models.source import open_model_source
from corolla.models.transfer import TellSometimes, WhileWanted
from corolla.net.findings import Finding
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.reachable import CHECK as REACH
from corolla.net.reachable import check_reachable
from corolla.net.streams import Transport
from corolla.server.config import ServerConfig
from corolla.server.device import check_device, free_memory_bytes
from corolla.server.executor import DeviceThread, until_quiet
from corolla.server.memory import journal_room
from corolla.server.moving import Placement
from corolla.server.publisher import Lifetimes, claimed_span
from corolla.server.serving import ServedSpan, announcement_of, serve_span
from corolla.server.tasks import Tasks

if TYPE_CHECKING:
    from corolla.models.span import Span
    from corolla.server.handler import Handler
    from corolla.server.hosting import Host, LoadedSpan, Room
    from corolla.server.speed import Speed

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What a server says of itself when it answers requests."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...]


Watch = Callable[["Handler", Libp2pTransport], AbstractContextManager[None]]
"""Looks on while a server serves: metrics."""

Check = Callable[[Libp2pTransport], Awaitable[Sequence[Finding]]]
"""Looks at a peer that has joined; what it finds is told, and one nobody can reach is not announced."""


async def run_server(
    config: ServerConfig,
    network: NetworkConfig,
    initial_peers: Sequence[str],
    *,
    stop: asyncio.Event,
    on_ready: Callable[[Ready], None],
    check: Check | None = None,
    watch: Watch | None = None,
) -> None:
    """Host a span until `stop` is set. Raises BadInput, NoPeers, or SwarmError when the network is lost."""
    check_device(config.device)
    is_left = threading.Event()  # a thread that downloads cannot be cancelled, and the process would wait for it
    try:
        checkpoint = await asyncio.to_thread(
            open_model_source,
            config.model,
            config.source,
            say=log.info,
            progress=WhileWanted(TellSometimes(log.info), is_left),
        )
        await _run(config, network, initial_peers, checkpoint, stop, on_ready, check, watch)
    finally:
        is_left.set()


async def _run(
    config: ServerConfig,
    network: NetworkConfig,
    initial_peers: Sequence[str],
    checkpoint: Checkpoint,
    stop: asyncio.Event,
    on_ready: Callable[[Ready], None],
    check: Check | None,
    watch: Watch | None,
) -> None:
    config.span_of(checkpoint.name, checkpoint.num_blocks)
    which = await asyncio.to_thread(fingerprint, checkpoint)  # of a hub's model, it reads some of its bytes
    config = _within_machine(_within_model(config, checkpoint))
    loading = asyncio.create_task(asyncio.to_thread(_begin, config, checkpoint, which))
    try:
        async with open_transport(network) as transport:
            if initial_peers:
                log.info("joining the swarm", extra={"addresses": len(initial_peers)})
                await transport.join(initial_peers, timeout_s=JOIN_TIMEOUT_S)
                _require_reachable(await (check or _check_reach)(transport))
            host, begun = await loading
            loaded, placement = await _settled(transport, host, begun, is_alone=not initial_peers)
            await _serve(transport, host, loaded, placement, stop, on_ready, watch)
    finally:
        loading.cancel()


async def _settled(
    transport: Transport, host: "Host", begun: "LoadedSpan | Room", *, is_alone: bool
) -> "tuple[LoadedSpan, Placement | None]":
    """What is loaded already, to stay; or blocks where this server helps most, agreed on with others and loaded."""
    from corolla.server.hosting import Room, SpanLoader

    if not isinstance(begun, Room):
        return begun, None
    served = _served(host, begun.expected_speed or (0.0, 0.0))
    joining = announcement_of(
        transport,
        host.config,
        served,
        state="joining",
        span=range(begun.plan.num_blocks),
        dtype=begun.dtype,
        is_movable=True,
    )
    async with claimed_span(
        transport, joining, begun.plan.num_blocks, rng=random.Random(), is_alone=is_alone,  # noqa: S311 - spreads load
        cuts=begun.cuts, on_disk=begun.on_disk, times=_times(host.config),
    ) as span:  # fmt: skip
        log.info("hosting blocks %s:%s, where this server helps most", span.start, span.stop)
        loaded = await asyncio.to_thread(host.load, span.start, span.stop)
    return loaded, Placement(SpanLoader(host, begun.plan), begun.cuts)


async def _serve(
    transport: Libp2pTransport,
    host: "Host",
    loaded: "LoadedSpan",
    placement: Placement | None,
    stop: asyncio.Event,
    on_ready: Callable[[Ready], None],
    watch: Watch | None,
) -> None:
    from corolla.server.span import TorchSpanRunner

    span = loaded.span
    served = _served(host, loaded.speed)
    runner = TorchSpanRunner(span)
    broken: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()

    def note_broken(error: SwarmError) -> None:
        if not broken.done():
            broken.set_result(error)

    device = DeviceThread()
    async with serve_span(
        transport, runner, device, host.config, served, placement=placement, on_broken=note_broken
    ) as handler:
        with watch(handler, transport) if watch is not None else nullcontext():
            on_ready(Ready(transport.peer, span.start, span.end, tuple(transport.addresses)))
            tasks = Tasks()
            tasks.spawn(_use_tapes(host, device, span))
            try:
                await until_stopped(stop, transport, broken)
            finally:
                await tasks.close(grace_s=0)
    if isinstance(handler.runner, TorchSpanRunner):  # not on the way from span to span
        host.remember(handler.runner.span, (handler.meter.decode_tokens_per_s, handler.meter.prefill_tokens_per_s))


async def _use_tapes(host: "Host", device: DeviceThread, span: "Span") -> None:
    """When nobody waits for a step: what a recording needs of torch takes as long to import as half of the start."""
    from corolla.models.recording import symbols

    await until_quiet(device)
    await asyncio.to_thread(symbols)
    await until_quiet(device)
    await device.call(partial(host.use_tapes, span))


def _served(host: "Host", speed: "Speed") -> ServedSpan:
    config, checkpoint = host.config, host.checkpoint
    return ServedSpan(
        config.model_name or checkpoint.name, host.model, checkpoint.num_blocks, *speed,
        quantization=None if config.quantization == "none" else config.quantization, commit=checkpoint.commit,
    )  # fmt: skip


def _times(config: ServerConfig) -> Lifetimes:
    return Lifetimes(config.announce_period_s, config.record_lifetime_s)


async def _check_reach(transport: Transport) -> list[Finding]:
    return [await check_reachable(transport)]


def _require_reachable(findings: Sequence[Finding]) -> None:
    """A server that nobody can dial would only be in the way: do not announce it, say why and what to do."""
    for finding in findings:
        tell_finding(finding)
    for finding in findings:
        if finding.check == REACH and finding.state == "bad":
            raise SwarmError(f"{finding.text}; {finding.next_step}")


def tell_finding(finding: Finding) -> None:
    """One line in the log; a warning with its next step where something is not well."""
    if finding.state == "ok":
        log.info("%s: %s", finding.check, finding.text)
    else:
        log.warning("%s: %s%s", finding.check, finding.text, f" → {finding.next_step}" if finding.next_step else "")


async def until_stopped(stop: asyncio.Event, transport: Transport, broken: "asyncio.Future[SwarmError]") -> None:
    """Return when told to stop; raise when the network is gone, or what keeps this server in use has failed."""
    stopped = asyncio.ensure_future(stop.wait())
    lost = asyncio.ensure_future(transport.wait_lost())
    try:
        await asyncio.wait((stopped, lost, broken), return_when=asyncio.FIRST_COMPLETED)
        if lost.done() and not stopped.done():
            raise SwarmError(f"the network daemon is gone: {lost.result()}")
        if broken.done() and not stopped.done():
            raise broken.result()
    finally:
        stopped.cancel()
        lost.cancel()


def _within_model(config: ServerConfig, checkpoint: Checkpoint) -> ServerConfig:
    """No session may be longer than the model knows positions, nor than the whole cache."""
    longest = min(
        config.limits.max_session_tokens,
        config.cache_tokens,
        checkpoint.max_positions or config.limits.max_session_tokens,
    )
    return replace(config, limits=replace(config.limits, max_session_tokens=longest))


def _within_machine(config: ServerConfig) -> ServerConfig:
    """What sessions pushed on lies in the machine's memory, wherever the blocks do."""
    room = journal_room(free_memory_bytes("cpu"), is_shared=not config.device.startswith("cuda"))
    limits = config.limits
    return replace(config, limits=replace(limits, max_journal_bytes=min(limits.max_journal_bytes, room)))


def _begin(config: ServerConfig, checkpoint: Checkpoint, which: Fingerprint) -> "tuple[Host, LoadedSpan | Room]":
    """In a thread beside the network's start: imports torch, and loads what need not be agreed on."""
    import_modeling()
    from corolla.server.hosting import Host

    gc.freeze()  # a million objects that stay: no collection, whether we or Python call for it, looks at them again
    host = Host(config, checkpoint, which)
    return host, host.begin()
