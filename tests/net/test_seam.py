"""What every network implementation promises (`net/streams.py`), tried on each of them.

A test is a scenario, `async def (lab)`, that `@seam` runs in every lab of `LABS`. A lab starts and kills peers of
one implementation; peers have names, and a name that comes back has the same identity and address.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from corolla.errors import BadInput, HopFailed, NoPeers
from corolla.ids import PeerId
from corolla.net.channel import Channel
from corolla.net.groups import group_of
from corolla.net.identity import Identity
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.net.records import MAX_LIFETIME_S, sign_record
from corolla.net.streams import ByteStream, Transport
from corolla.wire.frames import frame_message
from corolla.wire.messages import Heartbeat

PROTOCOL = "/corolla/test/1"
KEY = "corolla/1/test"
SOON_S = 5.0
"""Bound for what should take milliseconds: generous, because a loaded machine must not fail the promise."""


class Lab(Protocol):
    """One implementation's peers, for the time of one scenario."""

    async def peer(self, name: str, *, clock_skew_s: float = 0.0) -> Transport:
        """Start the peer of this name; joined to nobody."""
        ...

    def address(self, name: str) -> str:
        """Where the peer of this name listens, running or not."""
        ...

    def identity(self, name: str) -> Identity: ...

    async def kill(self, transport: Transport) -> None:
        """End it the hard way: no goodbye."""
        ...

    async def put_raw(self, by: Transport, key: str, peer: PeerId, blob: bytes) -> None:
        """What a hostile peer does: ask every peer it knows to store `blob` under (key, peer), unchecked by `by`."""
        ...


Scenario = Callable[[Lab], Coroutine[Any, Any, None]]


class MemoryLab:
    def __init__(self, network: MemoryNetwork, stack: AsyncExitStack) -> None:
        self.network = network
        self._stack = stack

    async def peer(self, name: str, *, clock_skew_s: float = 0.0) -> MemoryTransport:
        return await self._stack.enter_async_context(self.network.transport(name, clock_skew_s=clock_skew_s))

    def address(self, name: str) -> str:
        return f"memory://{identity_of(name).peer}"

    def identity(self, name: str) -> Identity:
        return identity_of(name)

    async def kill(self, transport: Transport) -> None:
        self.network.kill(transport.peer)

    async def put_raw(self, by: Transport, key: str, peer: PeerId, blob: bytes) -> None:
        for other in self.network.reachable(self.network.living[by.peer]).values():
            other.records.keep(key, peer, blob)


def run_in_memory(scenario: Scenario) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(MemoryLab(MemoryNetwork(random.Random(0)), stack))

    run_virtual(main())


class Libp2pLab:
    """Real daemons on loopback. A name keeps its port, so that it comes back where it was."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._ports: dict[str, int] = {}

    async def peer(self, name: str, *, clock_skew_s: float = 0.0) -> Libp2pTransport:
        config = NetworkConfig(
            identity=self.identity(name),
            listen=(f"127.0.0.1:{self._port(name)}",),
            directory=self._directory,
            wall_clock=lambda: time.time() + clock_skew_s,
        )
        return await self._stack.enter_async_context(open_transport(config))

    def address(self, name: str) -> str:
        return f"/ip4/127.0.0.1/tcp/{self._port(name)}/p2p/{self.identity(name).peer}"

    def identity(self, name: str) -> Identity:
        return identity_of(name)

    async def kill(self, transport: Transport) -> None:
        assert isinstance(transport, Libp2pTransport)
        os.kill(transport.daemon_pid, signal.SIGKILL)
        await transport.wait_lost()
        # libp2p opens streams without waiting for an answer: until the others' daemons have seen the connection end,
        # a dial to the dead peer succeeds, and ends a moment later.
        await asyncio.sleep(0.3)

    async def put_raw(self, by: Transport, key: str, peer: PeerId, blob: bytes) -> None:
        assert isinstance(by, Libp2pTransport)
        await hostile_store(by, key, peer, blob)

    def _port(self, name: str) -> int:
        if name not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[name] = probe.getsockname()[1]
        return self._ports[name]


async def hostile_store(by: Libp2pTransport, key: str, peer: PeerId, blob: bytes) -> None:
    """Send the DHT's own store request to everyone, past our side's checks, with the expiry that the blob claims."""
    protocol: Any = by.records._node.protocol  # pyright: ignore[reportAttributeAccessIssue]
    key_id = hivemind().DHTID.generate(source=key)
    expires_at = struct.unpack_from("!d", blob, 1)[0] if len(blob) > 9 else time.time() + 60
    for other in list(protocol.routing_table.peer_id_to_uid):
        await protocol.call_store(other, [key_id], [msgspec.msgpack.encode(blob)], [expires_at], subkeys=[peer])


def run_on_libp2p(scenario: Scenario) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="cor-") as directory:  # short: unix sockets' paths are bounded
            async with AsyncExitStack() as stack:
                await scenario(Libp2pLab(Path(directory), stack))

    asyncio.run(main())


LABS: dict[str, Callable[[Scenario], None]] = {"memory": run_in_memory, "libp2p": run_on_libp2p}


@pytest.fixture(params=[pytest.param(name, marks=() if name == "memory" else pytest.mark.slow) for name in LABS])
def run_in_lab(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    return LABS[request.param]


def seam(scenario: Scenario) -> Callable[[Callable[[Scenario], None]], None]:
    """Make a scenario a test that runs in every lab."""

    def test(run_in_lab: Callable[[Scenario], None]) -> None:
        run_in_lab(scenario)

    test.__name__ = scenario.__name__
    return test


class Ear:
    """Listens to one end of a stream and keeps what happened, in order."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.received = bytearray()
        self.reasons: list[str] = []
        self.bytes_after_close = 0
        self._happened = asyncio.Event()
        stream.start(self._on_bytes, self._on_closed)

    def _on_bytes(self, data: Any) -> None:
        if self.reasons:
            self.bytes_after_close += len(data)
        self.received += data
        self._happened.set()

    def _on_closed(self, reason: str) -> None:
        self.reasons.append(reason)
        self._happened.set()

    async def until(self, is_so: Callable[[], bool], within_s: float = SOON_S) -> None:
        async with asyncio.timeout(within_s):
            while not is_so():
                self._happened.clear()
                await self._happened.wait()

    async def until_received(self, num_bytes: int, within_s: float = SOON_S) -> bytes:
        await self.until(lambda: len(self.received) >= num_bytes, within_s)
        return bytes(self.received)

    async def until_closed(self, within_s: float = SOON_S) -> str:
        await self.until(lambda: bool(self.reasons), within_s)
        return self.reasons[0]


class Listener:
    """Takes the streams of one protocol."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[ByteStream] = asyncio.Queue(maxsize=100)

    async def stream(self) -> ByteStream:
        async with asyncio.timeout(SOON_S):
            return await self.streams.get()


async def eventually(is_so: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await is_so():  # noqa: ASYNC110 — what is waited for happens in other processes
            await asyncio.sleep(0.25)


@asynccontextmanager
async def bounded(seconds: float) -> AsyncIterator[None]:
    """The block ends by itself within this time; said apart from `asyncio.timeout`, which would end it."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    yield
    assert loop.time() - started_at <= seconds


async def two_peers(lab: Lab) -> tuple[Transport, Transport, Listener]:
    """`a`, which has joined `b`; and what listens at `b`."""
    a, b = await lab.peer("a"), await lab.peer("b")
    listener = Listener()
    await b.serve(PROTOCOL, listener.streams.put_nowait)
    await a.join(b.addresses, timeout_s=SOON_S)
    return a, b, listener


async def two_ears(lab: Lab) -> tuple[Ear, Ear]:
    """Both ends of an open stream from `a` to `b`."""
    a, b, listener = await two_peers(lab)
    ours = await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S)
    ours.write([b"\x00"])  # some transports announce a stream with its first bytes
    theirs = Ear(await listener.stream())
    await theirs.until_received(1)
    theirs.received.clear()
    return Ear(ours), theirs


# Streams


@seam
async def test_what_is_sent_comes_back_from_an_echo(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    ours.stream.write([b"hel", bytearray(b"l"), memoryview(b"o")])
    theirs.stream.write([await theirs.until_received(5)])
    assert await ours.until_received(5) == b"hello"


@seam
async def test_a_stream_names_both_callers(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    assert ours.stream.peer == lab.identity("b").peer
    assert theirs.stream.peer == lab.identity("a").peer


@seam
async def test_the_address_of_a_peer_is_known_while_a_stream_is_open(lab: Lab) -> None:
    a, b, listener = await two_peers(lab)
    assert b.peer_address(a.peer) is None
    ours = Ear(await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S))
    ours.stream.write([b"hello"])
    theirs = Ear(await listener.stream())
    await theirs.until_received(5)
    for address in (a.peer_address(b.peer), b.peer_address(a.peer)):
        assert group_of(address) is not None
    ours.stream.close()
    await ours.until_closed()
    await theirs.until_closed()
    assert a.peer_address(b.peer) is None
    assert b.peer_address(a.peer) is None


@seam
async def test_five_megabytes_in_odd_chunks_arrive_whole_and_in_order(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    rng = random.Random(5)
    sent = rng.randbytes(5_000_000)
    there = 0
    while there < len(sent):
        parts: list[bytes] = []
        for _ in range(rng.randrange(1, 4)):
            num_bytes = rng.choice([0, 1, 7, 4096, 65_537, 300_001])
            parts.append(sent[there : there + num_bytes])
            there += num_bytes
        ours.stream.write(parts)
    assert await theirs.until_received(len(sent), within_s=30) == sent
    theirs.stream.write([sent])
    assert await ours.until_received(len(sent), within_s=30) == sent


@seam
async def test_what_arrived_before_start_is_delivered_first(lab: Lab) -> None:
    a, b, listener = await two_peers(lab)
    ours = await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S)
    ours.write([b"early"])
    theirs = await listener.stream()
    await asyncio.sleep(0.2)
    ours.write([b", late"])
    assert await Ear(theirs).until_received(11) == b"early, late"


@seam
async def test_a_stream_can_be_written_from_another_thread(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    lines = [b"line %d\n" % number for number in range(500)]

    def write_all() -> None:
        for line in lines:
            ours.stream.write([line])

    thread = threading.Thread(target=write_all)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 — the loop runs beside the thread, but virtual time must stand still
        await asyncio.sleep(0)
    assert await theirs.until_received(len(b"".join(lines))) == b"".join(lines)


@seam
async def test_a_paused_reader_gets_nothing_and_the_writer_sees_it(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    theirs.stream.pause_reading()
    sent = random.Random(6).randbytes(32_000_000)
    for start in range(0, len(sent), 1_000_000):
        ours.stream.write([sent[start : start + 1_000_000]])
    await asyncio.sleep(0.5)
    held = len(theirs.received)
    assert held < 1_000_000
    assert ours.stream.pending_bytes > 1_000_000
    theirs.stream.resume_reading()
    assert await theirs.until_received(len(sent), within_s=60) == sent
    assert ours.stream.pending_bytes == 0


@seam
async def test_close_ends_both_sides_once_and_last(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    theirs.stream.write([b"x" * 1000])
    ours.stream.close()
    ours.stream.close()
    theirs.stream.write([b"y" * 1000])
    await ours.until_closed()
    await theirs.until_closed()
    await asyncio.sleep(0.2)
    for ear in (ours, theirs):
        assert len(ear.reasons) == 1
        assert ear.reasons[0]
        assert ear.bytes_after_close == 0


@seam
async def test_what_was_sent_well_before_a_close_arrives(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    ours.stream.write([b"last words"])
    await theirs.until_received(10)
    ours.stream.close()
    await theirs.until_closed()
    assert theirs.received == b"last words"


@seam
async def test_a_closed_stream_swallows_writes(lab: Lab) -> None:
    ours, theirs = await two_ears(lab)
    ours.stream.close()
    ours.stream.write([b"into the void"])
    await theirs.until_closed()
    theirs.stream.write([b"this too"])
    await asyncio.sleep(0.2)
    assert theirs.received == b""
    assert ours.received == b""


@seam
async def test_killing_a_peer_ends_its_streams_soon(lab: Lab) -> None:
    a, b, listener = await two_peers(lab)
    ours = Ear(await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S))
    ours.stream.write([b"hello"])
    theirs = Ear(await listener.stream())
    await theirs.until_received(5)
    await lab.kill(b)
    assert await ours.until_closed()
    await asyncio.sleep(0.1)
    assert len(ours.reasons) == 1


@seam
async def test_a_killed_peer_learns_that_its_transport_is_lost(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    waiting = asyncio.create_task(b.wait_lost())
    await asyncio.sleep(0)
    assert b.lost is None
    await lab.kill(b)
    async with asyncio.timeout(SOON_S):
        assert b.lost == await waiting != ""
    assert a.lost is None


@seam
async def test_dialling_a_dead_peer_fails_in_time(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    await lab.kill(b)
    async with bounded(SOON_S):
        with pytest.raises(HopFailed) as failure:
            await a.dial(b.peer, PROTOCOL, timeout_s=3)
    assert failure.value.peer == b.peer


@seam
async def test_dialling_an_unknown_peer_fails_in_time(lab: Lab) -> None:
    a, _b, _listener = await two_peers(lab)
    async with bounded(SOON_S):
        with pytest.raises(HopFailed):
            await a.dial(lab.identity("nobody").peer, PROTOCOL, timeout_s=3)


@seam
async def test_a_protocol_that_nobody_serves_fails_in_time(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    async with bounded(SOON_S):
        with pytest.raises(HopFailed):
            await a.dial(b.peer, "/corolla/unheard-of/1", timeout_s=3)


@seam
async def test_ping_tells_the_round_trip_and_who_is_dead(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    assert 0 < await a.ping(b.peer, timeout_s=SOON_S) < 1
    await lab.kill(b)
    async with bounded(SOON_S):
        with pytest.raises(HopFailed):
            await a.ping(b.peer, timeout_s=3)


@seam
async def test_peers_reach_each_other_through_the_peer_they_joined(lab: Lab) -> None:
    a, b, listener = await two_peers(lab)
    c = await lab.peer("c")
    await c.join(a.addresses, timeout_s=SOON_S)
    ours = await c.dial(b.peer, PROTOCOL, timeout_s=SOON_S)
    ours.write([b"hello"])
    theirs = Ear(await listener.stream())
    assert await theirs.until_received(5) == b"hello"
    assert theirs.stream.peer == c.peer
    ours.close()


# Joining


@seam
async def test_joining_nobody_says_where_and_how_long(lab: Lab) -> None:
    a = await lab.peer("a")
    async with bounded(2 + SOON_S):
        with pytest.raises(NoPeers) as failure:
            await a.join([lab.address("nobody")], timeout_s=2)
    assert lab.address("nobody") in str(failure.value)
    assert "2 s" in str(failure.value)


@seam
async def test_a_peer_that_starts_a_little_later_can_be_joined(lab: Lab) -> None:
    a = await lab.peer("a")
    joining = asyncio.create_task(a.join([lab.address("nobody"), lab.address("late")], timeout_s=20))
    await asyncio.sleep(1)
    late = await lab.peer("late")
    await joining
    assert await a.ping(late.peer, timeout_s=SOON_S) > 0


@seam
async def test_after_losing_all_peers_a_peer_rejoins_by_itself(lab: Lab) -> None:
    """The bootstrap peer comes back knowing nobody; who had joined it must find it, not the other way round."""
    boot, a = await lab.peer("boot"), await lab.peer("a")
    await a.join(boot.addresses, timeout_s=SOON_S)
    await lab.kill(boot)
    await asyncio.sleep(8)
    boot = await lab.peer("boot")
    newcomer = await lab.peer("newcomer")
    await newcomer.join(boot.addresses, timeout_s=SOON_S)

    async def newcomer_sees_the_record() -> bool:
        await a.records.put(KEY, b"still here", 60)
        return any(record.value == b"still here" for record in await newcomer.records.get(KEY))

    await eventually(newcomer_sees_the_record, within_s=60)


# Floods


async def serve_messages(transport: Transport) -> list[Channel]:
    """Take streams of `PROTOCOL` as servers do: whoever sends no message on one is found out by its first bytes."""
    taken: list[Channel] = []

    def accept(stream: ByteStream) -> None:
        taken.append(Channel(stream, we_dialed=False, on_message=lambda _: None, on_closed=lambda _: None))

    await transport.serve(PROTOCOL, accept)
    return taken


@seam
async def test_who_sends_noise_on_stream_after_stream_is_cut_off_and_a_busy_client_is_not(lab: Lab) -> None:
    a, b, mallory = await lab.peer("a"), await lab.peer("b"), await lab.peer("mallory")
    taken = await serve_messages(b)
    for peer in (a, mallory):
        await peer.join(b.addresses, timeout_s=SOON_S)
    num_needed = 132  # at once, by a client: 64 sessions with two each, and control (`tests/server/test_admission.py`)
    honest = [Ear(await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S)) for _ in range(num_needed)]
    waiting = Ear(await mallory.dial(b.peer, PROTOCOL, timeout_s=SOON_S))
    for ear in (*honest, waiting):
        ear.stream.write([b"".join(frame_message(Heartbeat(nonce=1)))])
    await eventually(lambda: returns(len(taken) == num_needed + 1), SOON_S)
    noise = random.Random(1).randbytes(20_000)

    async def throw() -> None:
        with contextlib.suppress(HopFailed):  # it is cut off
            Ear(await mallory.dial(b.peer, PROTOCOL, timeout_s=SOON_S)).stream.write([noise])

    for _ in range(40):
        await asyncio.gather(*(throw() for _ in range(20)))
        if waiting.reasons:
            break
    await waiting.until_closed()
    num_taken = len(taken)
    await throw()
    await asyncio.sleep(0.2)
    assert len(taken) == num_taken
    assert not any(ear.reasons for ear in honest)
    Ear(await a.dial(b.peer, PROTOCOL, timeout_s=SOON_S)).stream.write([b"".join(frame_message(Heartbeat(nonce=2)))])
    await eventually(lambda: returns(len(taken) > num_taken), SOON_S)


async def returns(value: bool) -> bool:
    return value


# Records


async def values(reader: Transport, key: str = KEY) -> dict[PeerId, bytes]:
    return {record.peer: record.value for record in await reader.records.get(key)}


@seam
async def test_a_record_is_read_by_others_with_its_publisher_and_expiry(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    assert await a.records.put(KEY, b"spam", 60)
    (record,) = await b.records.get(KEY)
    assert (record.peer, record.value) == (a.peer, b"spam")
    assert record.expires_at == pytest.approx(a.wall_time() + 60, abs=SOON_S)
    assert await b.records.get("corolla/1/other") == []


@seam
async def test_two_peers_share_a_key_and_the_newest_of_each_counts(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    c = await lab.peer("c")
    await c.join(b.addresses, timeout_s=SOON_S)
    assert await a.records.put(KEY, b"old", 60)
    assert await b.records.put(KEY, b"other", 60)
    await asyncio.sleep(0.1)
    assert await a.records.put(KEY, b"new", 60)
    for reader in (a, b, c):
        assert await values(reader) == {a.peer: b"new", b.peer: b"other"}


@seam
async def test_a_lone_peer_can_publish(lab: Lab) -> None:
    a = await lab.peer("a")
    assert await a.records.put(KEY, b"spam", 60)


@seam
async def test_publishing_says_no_when_all_others_are_gone(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    await lab.kill(b)
    async with bounded(30):
        assert not await a.records.put(KEY, b"spam", 60)


@seam
async def test_a_record_expires(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    assert await a.records.put(KEY, b"brief", 4)
    assert await values(b) == {a.peer: b"brief"}
    await asyncio.sleep(4.5)
    assert await values(b) == {}


@seam
async def test_a_record_over_the_bounds_is_never_sent(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    with pytest.raises(BadInput, match="1024"):
        await a.records.put(KEY, b"x" * 1025, 60)
    with pytest.raises(BadInput, match="600"):
        await a.records.put(KEY, b"spam", MAX_LIFETIME_S + 1)
    assert await values(b) == {}


@seam
async def test_forged_records_are_neither_kept_nor_read(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    mallory = await lab.peer("mallory")
    await mallory.join(b.addresses, timeout_s=SOON_S)
    own, soon = lab.identity("mallory"), mallory.wall_time() + 60
    forged = {
        "another's name": (a.peer, sign_record(own, KEY, b"forged", soon)),
        "another key's record": (own.peer, sign_record(own, "corolla/1/other", b"forged", soon)),
        "ten years": (own.peer, sign_record(own, KEY, b"forged", soon + 3e8)),
        "eleven minutes and more": (own.peer, sign_record(own, KEY, b"forged", soon + MAX_LIFETIME_S + 30)),
        "changed after signing": (own.peer, sign_record(own, KEY, b"honest", soon).replace(b"honest", b"forged")),
        "no signature": (own.peer, b"forged"),
        "too large": (own.peer, sign_record(own, KEY, b"forged", soon) + b"x" * 1024),
        "no peer": (PeerId("nobody"), sign_record(own, KEY, b"forged", soon)),
    }
    for peer, blob in forged.values():
        await lab.put_raw(mallory, KEY, peer, blob)
    assert await values(b) == {}
    assert await a.records.put(KEY, b"true", 60)
    assert await values(b) == {a.peer: b"true"}
    assert await values(mallory) == {a.peer: b"true"}


@seam
async def test_an_old_record_does_not_replace_a_newer_one(lab: Lab) -> None:
    a, b, _listener = await two_peers(lab)
    mallory = await lab.peer("mallory")
    await mallory.join(b.addresses, timeout_s=SOON_S)
    old = sign_record(lab.identity("a"), KEY, b"old", a.wall_time() + 30)
    assert await a.records.put(KEY, b"new", 60)
    await lab.put_raw(mallory, KEY, a.peer, old)
    assert await values(b) == {a.peer: b"new"}


@seam
async def test_clocks_a_minute_apart_are_tolerated(lab: Lab) -> None:
    a = await lab.peer("a")
    ahead, behind = await lab.peer("ahead", clock_skew_s=58), await lab.peer("behind", clock_skew_s=-58)
    for other in (ahead, behind):
        await other.join(a.addresses, timeout_s=SOON_S)
    for publisher in (a, ahead, behind):
        assert await publisher.records.put(KEY, publisher.peer.encode(), 180)
    everyone = {peer.peer: peer.peer.encode() for peer in (a, ahead, behind)}
    assert await values(a) == everyone
