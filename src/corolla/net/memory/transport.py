"""One peer of the network in memory, as `net/streams.py` asks for it.

What befalls it (kills, frozen processes, cut links) is `network.py`'s to do.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from corolla.errors import BadInput, HopFailed, LocalProtocolError, NoPeers
from corolla.ids import PeerId
from corolla.net import reach
from corolla.net.gate import Gate, GateConfig
from corolla.net.groups import group_of
from corolla.net.guard import StreamGuard, Verdict
from corolla.net.identity import Identity, from_seed
from corolla.net.memory.records import MemoryRecords, Traffic
from corolla.net.memory.streams import MemoryStream, Pipe
from corolla.net.places import UNKNOWN
from corolla.net.streams import Accept, ByteStream

if TYPE_CHECKING:
    from corolla.net.memory.network import MemoryNetwork

ADDRESS_HEAD: Final = "memory://"
OPEN: Final = GateConfig()

WALL_START: Final = 1_800_000_000.0
"""Wall time at loop time 0; a round number, so that a date in a failing test is easy to read."""

JOIN_RETRY_S: Final = 0.5
MEET_TIMEOUT_S: Final = 3.0
REJOIN_AFTER_S: Final = 15.0
"""How soon a peer finds its bootstrap peers again once they are back: the libp2p transport pings them as often."""


class MemoryTransport:
    """One peer, as `net/streams.py` asks for it."""

    def __init__(
        self,
        network: "MemoryNetwork",
        identity: Identity,
        clock_skew_s: float,
        *,
        is_client: bool = False,
        gate: GateConfig = OPEN,
        address: str,
        listed: frozenset[PeerId] = frozenset(),
    ) -> None:
        self.address: Final = address
        self.is_client: Final = is_client
        self.network: Final = network
        self.identity: Final = identity
        self.peer: Final = identity.peer
        self.clock_skew_s: float = clock_skew_s
        self.known: set[PeerId] = set()
        self._gate_config = gate
        self._gate: Gate = Gate(identity.peer, gate)
        self.guard: Final = StreamGuard(listed=listed)
        self._links = network.links
        self._accepts: dict[str, Accept] = {}
        self._streams: dict[MemoryStream, None] = {}
        self._bootstrap: list[PeerId] = []
        self._rejoin: asyncio.TimerHandle | None = None
        self._lost: asyncio.Future[str] | None = None
        self._helper = reach.Helper(self.peer_address, self._locate, self._probe)
        self._records = MemoryRecords(
            identity,
            wall_time=self.wall_time,
            answering=lambda: network.keepers(self),
            has_met_others=lambda: bool(self.known),
            round_trip_s=self._round_trip_s,
            group=group_of(address) or UNKNOWN,
        )

    async def __aenter__(self) -> Self:
        self._lost = asyncio.get_running_loop().create_future()
        self.network.enter(self)
        if not self.is_client:
            await self.serve(reach.PROTOCOL, self._helper.accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def addresses(self) -> list[str]:
        return [ADDRESS_HEAD + self.peer]

    @property
    def records(self) -> MemoryRecords:
        return self._records

    @property
    def traffic(self) -> Traffic:
        """What records cost this peer so far."""
        return self._records.traffic

    @property
    def lost(self) -> str | None:
        return self._lost.result() if self._lost is not None and self._lost.done() else None

    @property
    def num_streams(self) -> int:
        """Open ones, whoever dialled."""
        return len(self._streams)

    def met_peers(self) -> list[PeerId]:
        return sorted(peer for peer, other in self.network.reachable(self).items() if not other.is_client)

    def peer_address(self, peer: PeerId) -> str | None:
        return self._address_of(peer) if any(stream.peer == peer for stream in self._streams) else None

    def wall_time(self) -> float:
        return WALL_START + asyncio.get_running_loop().time() + self.clock_skew_s

    async def join(self, addresses: Sequence[str], *, timeout_s: float) -> None:
        peers = [_peer_of(address) for address in addresses]
        if not self._is_running:
            raise NoPeers("this peer's own transport is not running")
        try:
            async with asyncio.timeout(timeout_s):
                await self._meet_any(peers)
        except TimeoutError:
            raise NoPeers(f"nobody answered at {', '.join(addresses)} within {timeout_s:g} s") from None
        self._bootstrap += [peer for peer in peers if peer not in self._bootstrap]

    async def dial(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        try:
            async with asyncio.timeout(timeout_s):
                other = await self._reach(peer)
                accept = other._accepts.get(protocol)
                if accept is None:
                    await self._links.cross((peer, self.peer))
                    raise HopFailed(peer, f"does not take {protocol}")
                stream = await self._open_stream(other, lambda theirs: other._take(theirs, protocol, accept))
                return await self._gate.pass_out(stream, protocol)
        except TimeoutError:
            raise HopFailed(peer, f"no answer to a dial within {timeout_s:g} s") from None

    async def serve(self, protocol: str, accept: Accept) -> None:
        if protocol in self._accepts:
            raise LocalProtocolError(f"{protocol} is served already")
        self._accepts[protocol] = accept

    async def ping(self, peer: PeerId, *, timeout_s: float) -> float:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                other = await self._reach(peer)
                await self._links.cross((peer, self.peer))
                if not other.takes_calls_of(self):
                    raise HopFailed(peer, "its swarm is private: the swarm key is missing, or is another")
        except TimeoutError:
            raise HopFailed(peer, f"no answer to a ping within {timeout_s:g} s") from None
        return loop.time() - started_at

    def takes_calls_of(self, asker: "MemoryTransport") -> bool:
        """Whether a call of the hash table's would pass both sides' checks; its proof is only thought here."""
        ours, theirs = self._gate_config, asker._gate_config
        shares_key = not set(theirs.keys).isdisjoint(ours.keys) if theirs.keys else not ours.keys
        return ours.allows(asker.peer) and shares_key

    async def wait_lost(self) -> str:
        assert self._lost is not None, "a transport is used inside its `async with`"
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        await self._helper.close()
        await self._gate.close()
        self.end("the transport was closed")

    def end(self, reason: str) -> None:
        """Be gone, with all streams. What had left before still arrives."""
        if self._lost is None or not self._is_running:
            return
        for stream in list(self._streams):
            stream.fail(reason, told_to_peer="reset by the other side")
        if self._rejoin is not None:
            self._rejoin.cancel()
        self._lost.set_result(reason)
        self.network.leave(self)

    @property
    def _is_running(self) -> bool:
        return self._lost is not None and not self._lost.done()

    async def _locate(self, address: str) -> list[str]:
        other = self.network.living.get(PeerId(address.removeprefix(ADDRESS_HEAD)))
        return [other.address] if other is not None else []

    async def _probe(self, _host: str, address: str, peer: PeerId) -> reach.Verdict:
        if address != ADDRESS_HEAD + peer:
            return "other"
        await self._links.cross((self.peer, peer))
        await self._links.cross((peer, self.peer))
        return "refused" if peer in self.network.hidden else "reached"

    def rejoin_later(self) -> None:
        """Meet the bootstrap peers again in a while, should they be there but not know us."""
        if self._bootstrap and self._rejoin is None:
            self._rejoin = asyncio.get_running_loop().call_later(REJOIN_AFTER_S, self._meet_again)

    def _meet_again(self) -> None:
        self._rejoin = None
        for peer in self._bootstrap:
            if self.network.answers(self.peer, peer):
                self._get_to_know(self.network.living[peer])

    async def _meet_any(self, peers: Sequence[PeerId]) -> None:
        """Try all of them at once, again and again, until one answers."""
        while True:
            met = await asyncio.gather(*[self._meet(peer) for peer in peers])
            if any(met):
                return
            await asyncio.sleep(JOIN_RETRY_S)

    async def _meet(self, peer: PeerId) -> bool:
        """One attempt to join at this peer. False: nobody there, or no answer in time."""
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                await self._links.cross((self.peer, peer))
                other = self.network.living.get(peer)
                await self._links.cross((peer, self.peer))
        except TimeoutError:
            return False
        if other is None or other is self or not self._is_running or not other.takes_calls_of(self):
            return False
        self._get_to_know(other)
        return True

    def _get_to_know(self, other: "MemoryTransport") -> None:
        """`other`, and through it everyone who can be reached; they learn of us as well."""
        self.network.introduce(self, other)
        for found in list(self.network.reachable(self).values()):
            self.network.introduce(self, found)

    async def _reach(self, peer: PeerId) -> "MemoryTransport":
        """Be at that peer's door: one way of the travel. Raises HopFailed when nobody knows it or is there."""
        if not self._is_running:
            raise HopFailed(peer, "our own transport is not running")
        if peer not in self.known and peer not in self.network.reachable(self):
            await asyncio.sleep(max((self._round_trip_s(known) for known in self.network.reachable(self)), default=0.0))
            raise HopFailed(peer, "unknown to all peers that we can reach")
        await self._links.cross((self.peer, peer))
        other = self.network.living.get(peer)
        if other is None:
            await self._links.cross((peer, self.peer))
            raise HopFailed(peer, "no such peer there any more: connection refused")
        self.network.introduce(self, other)
        return other

    async def _open_stream(self, other: "MemoryTransport", accept: Accept) -> MemoryStream:
        there, back = Pipe(self._links, self.peer, other.peer), Pipe(self._links, other.peer, self.peer)
        ours, theirs = self._hold(other.peer, there, back), other._hold(self.peer, back, there)
        asyncio.get_running_loop().call_soon(accept, theirs)
        try:
            await self._links.cross((other.peer, self.peer))
        except asyncio.CancelledError:
            ours.close()  # given up in the middle: the other side must not keep half a stream
            raise
        return ours

    def _take(self, stream: ByteStream, protocol: str, accept: Accept) -> None:
        now, address = asyncio.get_running_loop().time(), self._address_of(stream.peer)
        num_open = sum(other.peer == stream.peer for other in self._streams) - 1  # without itself
        verdict = self.guard.judge(stream.peer, address, now, num_open=num_open)
        if verdict == "take":
            self._gate.let_in(stream, protocol, accept)
        else:
            stream.close()
            self._cut_off_if(verdict, stream.peer)

    def _saw_nonsense(self, peer: PeerId) -> None:
        now = asyncio.get_running_loop().time()
        self._cut_off_if(self.guard.saw_nonsense(peer, self._address_of(peer), now), peer)

    def _cut_off_if(self, verdict: Verdict, peer: PeerId) -> None:
        if verdict == "cut":
            for stream in [stream for stream in self._streams if stream.peer == peer]:
                stream.fail("cut off: it floods us with streams", told_to_peer="reset by the other side")

    def _address_of(self, peer: PeerId) -> str | None:
        other = self.network.living.get(peer)
        return None if other is None else other.address

    def _hold(self, peer: PeerId, outgoing: Pipe, incoming: Pipe) -> MemoryStream:
        stream = MemoryStream(
            peer, outgoing, incoming,
            forget=lambda gone: self._streams.pop(gone, None), on_nonsense=self._saw_nonsense,
        )  # fmt: skip
        self._streams[stream] = None
        return stream

    def _round_trip_s(self, peer: PeerId) -> float:
        there, back = self._links.conditions((self.peer, peer)), self._links.conditions((peer, self.peer))
        return there.latency_s + back.latency_s


@lru_cache(maxsize=4096)
def identity_of(name: str) -> Identity:
    """The identity of the peer with this name: always the same one."""
    return from_seed(hashlib.sha256(b"corolla memory peer " + name.encode()).digest())


def _peer_of(address: str) -> PeerId:
    if not address.startswith(ADDRESS_HEAD):
        raise BadInput(f"not an address in memory ({ADDRESS_HEAD}<peer id>): {address!r:.100}")
    return PeerId(address.removeprefix(ADDRESS_HEAD))
