"""The network as `net/streams.py` asks for it, over hivemind's libp2p daemon and DHT.

`open_transport` puts the parts together, in the order in which they live: a private directory, the daemon, its
control socket, the listener for incoming streams, the DHT node, and the keeping in touch.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from corolla.clock import WallClock, loop_time
from corolla.errors import HopFailed, SwarmError
from corolla.ids import PeerId, short
from corolla.net import identity as identities
from corolla.net import reach
from corolla.net.gate import Gate
from corolla.net.guard import StreamGuard, Verdict
from corolla.net.identity import Identity
from corolla.net.libp2p import ping, probe
from corolla.net.libp2p.addresses import most_reachable_first
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.control import Control, DaemonRefused, DaemonSilent, RawStream
from corolla.net.libp2p.daemon import Daemon, DaemonConfig, run_daemon
from corolla.net.libp2p.dht import Dht
from corolla.net.libp2p.listener import Listener
from corolla.net.libp2p.membership import Membership
from corolla.net.libp2p.process import OwnProcess
from corolla.net.libp2p.rundir import run_dir
from corolla.net.libp2p.stream import SocketStream
from corolla.net.libp2p.traffic import DhtTraffic
from corolla.net.streams import Accept, ByteStream, Records

log = logging.getLogger(__name__)

LOSS_SHOWS_S = 1.0
"""After our daemon has stopped answering; it takes milliseconds, and on a busy machine some more."""


class Libp2pTransport:
    """`Transport`. Made by `open_transport`; belongs to the loop and the process that made it."""

    def __init__(
        self,
        peer: PeerId,
        daemon: Daemon,
        control: Control,
        dht: Dht,
        addresses: list[str],
        gate: Gate,
        guard: StreamGuard,
        wall_clock: WallClock,
        parts: AsyncExitStack,
        *,
        is_client: bool,
    ) -> None:
        self._process = OwnProcess()
        self._peer = peer
        self._daemon = daemon
        self._control = control
        self._addresses = addresses
        self._gate = gate
        self._guard = guard
        self._cutting: dict[PeerId, asyncio.Task[None]] = {}
        self._is_client = is_client
        self._helper = reach.Helper(self.peer_address, probe.locate, probe.probe)
        self._wall_clock = wall_clock
        self._dht = dht
        rng = random.Random()  # noqa: S311 (picks whom to ask)
        self._membership = Membership(peer, control, dht, rng, is_client=is_client)
        self._listener: Listener | None = None
        self._accepts: dict[str, Accept] = {}
        self._streams: dict[PeerId, list[SocketStream]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._parts = parts
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._closing: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    @property
    def records(self) -> Records:
        return self._dht

    @property
    def dht_traffic(self) -> DhtTraffic:
        """What this peer asked of the hash table and answered for others since it started."""
        return self._dht.traffic

    @property
    def turned_away(self) -> dict[str, int]:
        """How many streams of others were not taken since this peer started, by why: above the rates and closed; of a
        peer that is cut off; without the swarm key's proof, or of a peer that is not on the list."""
        guard, gate = self._guard.turned_away, self._gate.refused
        return {"closed": guard["close"], "cut_off": guard["cut"], "not_admitted": gate.total()}

    @property
    def daemon_pid(self) -> int:
        """For status lines, and for tests that kill it."""
        return self._daemon.pid

    @property
    def lost(self) -> str | None:
        return self._lost.result() if self._lost.done() else None

    def met_peers(self) -> list[PeerId]:
        return self._dht.met_peers()

    def peer_address(self, peer: PeerId) -> str | None:
        streams = self._streams.get(peer)
        return streams[-1].address if streams else None

    def wall_time(self) -> float:
        return self._wall_clock()

    async def join(self, addresses: Sequence[str], *, timeout_s: float) -> None:
        self._process.check()
        await self._membership.join(addresses, timeout_s)

    async def dial(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        self._process.check()
        if self._lost.done():
            raise HopFailed(peer, f"this side's own network is lost: {self._lost.result()}")
        try:
            async with asyncio.timeout(timeout_s):
                raw = await self._control.open_stream(peer, protocol, timeout_s)
                return await self._gate.pass_out(self._hold(SocketStream(raw, self._forget)), protocol)
        except TimeoutError:
            raise HopFailed(peer, f"no answer to a dial within {timeout_s:g} s") from None
        except (DaemonRefused, ValueError) as fault:
            if isinstance(fault, DaemonSilent):  # its sockets end a moment before it does
                await asyncio.wait([self._lost], timeout=LOSS_SHOWS_S)
            raise HopFailed(peer, str(fault)) from fault

    async def serve(self, protocol: str, accept: Accept) -> None:
        self._process.check()
        assert self._listener is not None
        self._accepts[protocol] = accept
        await self._control.handle_streams(protocol, self._listener.path)

    async def ping(self, peer: PeerId, *, timeout_s: float) -> float:
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self.dial(peer, ping.PROTOCOL, timeout_s=timeout_s)
                try:
                    rtt_s = await ping.measure(stream)
                finally:
                    stream.close()
        except TimeoutError:
            raise HopFailed(peer, f"no answer to a ping within {timeout_s:g} s") from None
        if rtt_s is None:
            raise HopFailed(peer, "ended the stream in place of answering a ping")
        return rtt_s

    async def clock_ahead_s(self, peer: PeerId, *, timeout_s: float) -> float:
        """How far the peer's wall clock is ahead of ours, give or take half a round trip. Raises HopFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._dht.ping(peer)).clock_ahead_s
        except TimeoutError:
            raise HopFailed(peer, f"no answer within {timeout_s:g} s") from None
        except SwarmError as fault:
            raise HopFailed(peer, str(fault)) from fault

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Whoever calls it, and however often: done once, and waited for."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def begin(self, listener: Listener) -> None:
        """Take streams, answer pings, keep in touch. For `open_transport`."""
        self._listener = listener
        await self.serve(ping.PROTOCOL, ping.answer)
        if not self._is_client:
            await self.serve(reach.PROTOCOL, self._helper.accept)
        self._tasks = [asyncio.ensure_future(task) for task in (self._watch(), self._membership.keep_joined())]

    def take(self, raw: RawStream) -> None:
        """Give an incoming stream to whoever serves its protocol."""
        accept = self._accepts.get(raw.protocol)
        if accept is None or self._lost.done():
            raw.sock.close()
            return
        num_open = len(self._streams.get(raw.peer, ()))
        if (verdict := self._guard.judge(raw.peer, raw.address, loop_time(), num_open=num_open)) != "take":
            raw.sock.close()
            self._cut_off_if(verdict, raw.peer)
            return
        stream = self._hold(SocketStream(raw, self._forget, on_nonsense=self._saw_nonsense, is_incoming=True))
        try:
            self._gate.let_in(stream, raw.protocol, accept)
        except Exception:  # a handler's bug costs its stream, not the listener
            log.exception("handler of incoming streams failed", extra={"protocol": raw.protocol})
            stream.close()

    def _hold(self, stream: SocketStream) -> SocketStream:
        self._streams.setdefault(stream.peer, []).append(stream)
        return stream

    def _forget(self, stream: SocketStream) -> None:
        streams = self._streams[stream.peer]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.peer]

    def _saw_nonsense(self, stream: SocketStream) -> None:
        self._cut_off_if(self._guard.saw_nonsense(stream.peer, stream.address, loop_time()), stream.peer)

    def _cut_off_if(self, verdict: Verdict, peer: PeerId) -> None:
        """Each stream costs the flooder a new connection then, in place of us what it sends on it."""
        if verdict == "cut" and peer not in self._cutting:
            self._cutting[peer] = task = asyncio.ensure_future(self._disconnect(peer))
            task.add_done_callback(lambda _: self._cutting.pop(peer))

    async def _disconnect(self, peer: PeerId) -> None:
        try:
            await self._control.disconnect(peer)
        except SwarmError as fault:  # it has left itself
            log.debug("not cut off", extra={"peer": short(peer), "reason": str(fault)})

    async def _watch(self) -> None:
        """Notice the daemon's death, and end what depended on it."""
        ended = asyncio.ensure_future(self._daemon.wait_ended())
        broken = asyncio.ensure_future(self._dht.wait_broken())
        try:
            await asyncio.wait([ended, broken], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # the pipe may tell a moment later; and without its calls the DHT is dead anyhow
                await self._daemon.stop()
            reason = await ended
        finally:
            ended.cancel()
            broken.cancel()
        log.error("the network is lost", extra={"reason": reason})
        await self._end_streams(reason)
        self._lost.set_result(reason)

    async def _close(self) -> None:
        tasks = [*self._tasks, *self._cutting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._helper.close()
        await self._gate.close()
        await self._end_streams("the transport was closed")
        if not self._lost.done():
            self._lost.set_result("the transport was closed")
        await self._parts.aclose()

    async def _end_streams(self, reason: str) -> None:
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.end(reason)
        await asyncio.sleep(0)  # their `on_closed` runs in the loop's next turn


@asynccontextmanager
async def open_transport(config: NetworkConfig) -> AsyncIterator[Libp2pTransport]:
    """A running transport; at the end of the block everything that it started is gone.

    Raises BadInput for an identity file or a listening address that cannot be used.
    """
    identity = _identity_of(config)
    daemon_config = DaemonConfig(config.listen_on, config.announce_as, is_client=config.is_client)
    async with AsyncExitStack() as parts:
        directory = parts.enter_context(run_dir(config.directory))
        daemon = await parts.enter_async_context(run_daemon(directory, identity, daemon_config))
        control = Control(daemon.control_path)
        addresses = await _ask_addresses(control, identity.peer)
        dht = await parts.enter_async_context(
            Dht(daemon.control_path, identity, config.wall_clock, is_client=config.is_client, gate=config.gate)
        )
        transport = Libp2pTransport(
            identity.peer, daemon, control, dht, addresses,
            Gate(identity.peer, config.gate), StreamGuard(config.stream_limits, config.listed),
            config.wall_clock, parts, is_client=config.is_client,
        )  # fmt: skip
        listener = await parts.enter_async_context(Listener(directory / "streams", transport.take))
        await transport.begin(listener)
        try:
            yield transport
        finally:
            await transport.close()


def _identity_of(config: NetworkConfig) -> Identity:
    match config.identity:
        case None:
            return identities.ephemeral()
        case Path() as path:
            return identities.load_or_create(path)
        case Identity() as identity:
            return identity


async def _ask_addresses(control: Control, peer: PeerId) -> list[str]:
    daemon_peer, multiaddrs = await control.identify()
    if daemon_peer != peer:
        raise SwarmError(f"the network daemon calls itself {daemon_peer}, not {peer}")
    return [f"{multiaddr}/p2p/{peer}" for multiaddr in most_reachable_first(multiaddrs)]
