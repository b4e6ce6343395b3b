"""The faults of the in-memory network are the faults meant: delay, silence, reset; never lost or reordered bytes."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput, HopFailed, LocalProtocolError, NoPeers
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.streams import MemoryStream
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.net.records import sign_record
from corolla.net.streams import ByteStream, Transport

PROTOCOL = "/corolla/test/1"
LATENCY_S = 0.05


def now() -> float:
    return asyncio.get_running_loop().time()


class Ear:
    """One end of a stream: what it got, and when."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.received = bytearray()
        self.arrivals: list[tuple[float, int]] = []
        self.closings: list[tuple[float, str]] = []
        stream.start(self._on_bytes, lambda reason: self.closings.append((now(), reason)))

    def _on_bytes(self, data: Any) -> None:
        assert not self.closings
        self.received += data
        self.arrivals.append((now(), len(data)))

    @property
    def closed_at(self) -> float | None:
        return self.closings[0][0] if self.closings else None


class Pair:
    """`a` and `b` on one network, with an open stream between them."""

    def __init__(self, network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport, ours: Ear, theirs: Ear) -> None:
        self.network, self.a, self.b, self.ours, self.theirs = network, a, b, ours, theirs


@asynccontextmanager
async def pair(conditions: LinkConditions | None = None, seed: int = 0) -> AsyncIterator[Pair]:
    network = MemoryNetwork(random.Random(seed), conditions or LinkConditions(latency_s=LATENCY_S))
    async with network.transport("a") as a, network.transport("b") as b:
        accepted: list[ByteStream] = []
        await b.serve(PROTOCOL, accepted.append)
        await a.join(b.addresses, timeout_s=60)
        stream = await a.dial(b.peer, PROTOCOL, timeout_s=60)
        yield Pair(network, a, b, Ear(stream), Ear(accepted[0]))


def with_pair(scenario: Callable[[Pair], Awaitable[None]], conditions: LinkConditions | None = None) -> None:
    async def main() -> None:
        async with pair(conditions) as both:
            await scenario(both)

    run_virtual(main())


def test_the_transport_is_what_the_seam_asks_for() -> None:
    transport: Transport = MemoryNetwork(random.Random(0)).transport("a")
    assert transport.addresses == [f"memory://{identity_of('a').peer}"]


def test_bytes_take_the_latency_of_their_direction() -> None:
    async def scenario(both: Pair) -> None:
        both.network.set_conditions(both.b.peer, both.a.peer, LinkConditions(latency_s=0.3), one_way=True)
        sent_at = now()
        both.ours.stream.write([b"there"])
        both.theirs.stream.write([b"back"])
        await asyncio.sleep(1)
        assert both.theirs.arrivals == [(pytest.approx(sent_at + LATENCY_S), 5)]
        assert both.ours.arrivals == [(pytest.approx(sent_at + 0.3), 4)]
        assert await both.a.ping(both.b.peer, timeout_s=1) == pytest.approx(LATENCY_S + 0.3)

    with_pair(scenario)


def test_bandwidth_is_shared_by_all_streams_of_a_link() -> None:
    async def scenario(both: Pair) -> None:
        ears: list[Ear] = [both.theirs]
        await both.b.serve("/corolla/second/1", lambda stream: ears.append(Ear(stream)))
        second = await both.a.dial(both.b.peer, "/corolla/second/1", timeout_s=5)
        sent_at = now()
        both.ours.stream.write([bytes(500_000)])
        second.write([bytes(500_000)])
        await asyncio.sleep(20)
        assert [len(ear.received) for ear in ears] == [500_000, 500_000]
        last_at = max(ear.arrivals[-1][0] for ear in ears)
        assert 1.0 < last_at - sent_at < 1.0 + 3 * LATENCY_S
        assert min(ear.arrivals[-1][0] for ear in ears) - sent_at > 0.6

    with_pair(scenario, LinkConditions(latency_s=LATENCY_S, bytes_per_s=1e6))


def test_loss_and_jitter_delay_bytes_but_keep_them_all_in_order() -> None:
    async def scenario(both: Pair) -> None:
        sent = random.Random(1).randbytes(300_000)
        for start in range(0, len(sent), 1000):
            both.ours.stream.write([sent[start : start + 1000]])
            await asyncio.sleep(0.001)
        done_at = now()
        await asyncio.sleep(300)
        assert bytes(both.theirs.received) == sent
        assert both.theirs.arrivals[-1][0] > done_at + LATENCY_S
        times = [at for at, _ in both.theirs.arrivals]
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) > 0.15, "a retransmission's pause"

    with_pair(scenario, LinkConditions(latency_s=LATENCY_S, jitter_s=0.1, loss=0.2))


def test_borders_between_writes_are_not_kept() -> None:
    """Small writes may arrive together and one write may arrive in parts, as on a real socket."""

    async def scenario(both: Pair) -> None:
        for _ in range(300):
            both.ours.stream.write([b"0123456789"])
        await asyncio.sleep(1)
        assert bytes(both.theirs.received) == b"0123456789" * 300
        together = len(both.theirs.arrivals)
        for _ in range(300):
            both.ours.stream.write([b"0123456789"])
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        assert together < 300
        assert any(num_bytes < 10 for _, num_bytes in both.theirs.arrivals[together:])

    with_pair(scenario)


def test_a_partition_is_silence_and_what_was_sent_arrives_after_it() -> None:
    async def scenario(both: Pair) -> None:
        both.network.partition([both.a.peer], [both.b.peer])
        both.ours.stream.write([b"through the wall"])
        both.theirs.stream.write([b"and back"])
        await asyncio.sleep(600)
        assert both.theirs.received == both.ours.received == b""
        assert both.ours.closed_at is both.theirs.closed_at is None
        both.network.heal([both.a.peer], [both.b.peer])
        await asyncio.sleep(2 * LATENCY_S)
        assert both.theirs.received == b"through the wall"
        assert both.ours.received == b"and back"

    with_pair(scenario)


def test_a_one_way_partition_lets_the_other_way_through() -> None:
    async def scenario(both: Pair) -> None:
        both.network.partition([both.a.peer], [both.b.peer], one_way=True)
        both.ours.stream.write([b"stopped"])
        both.theirs.stream.write([b"passes"])
        await asyncio.sleep(10)
        assert both.theirs.received == b""
        assert both.ours.received == b"passes"
        with pytest.raises(HopFailed, match="1 s"):
            await both.b.ping(both.a.peer, timeout_s=1)

    with_pair(scenario)


def test_back_pressure_shows_during_a_partition() -> None:
    async def scenario(both: Pair) -> None:
        both.network.partition([both.a.peer], [both.b.peer])
        both.ours.stream.write([bytes(1_000_000)])
        await asyncio.sleep(60)
        assert both.ours.stream.pending_bytes > 700_000
        both.network.heal([both.a.peer], [both.b.peer])
        await asyncio.sleep(1)
        assert both.ours.stream.pending_bytes == 0
        assert len(both.theirs.received) == 1_000_000

    with_pair(scenario)


def test_a_writer_whose_acknowledgements_are_cut_off_sees_back_pressure() -> None:
    async def scenario(both: Pair) -> None:
        both.network.partition([both.b.peer], [both.a.peer], one_way=True)
        both.ours.stream.write([bytes(1_000_000)])
        await asyncio.sleep(60)
        assert both.ours.stream.pending_bytes > 700_000
        both.network.heal([both.b.peer], [both.a.peer], one_way=True)
        await asyncio.sleep(1)
        assert len(both.theirs.received) == 1_000_000

    with_pair(scenario)


def test_a_frozen_peer_is_silent_both_ways_until_it_thaws() -> None:
    async def scenario(both: Pair) -> None:
        both.network.freeze(both.b.peer)
        both.ours.stream.write([b"hello"])
        both.theirs.stream.write([b"from the ice"])
        await asyncio.sleep(600)
        assert both.theirs.received == both.ours.received == b""
        with pytest.raises(HopFailed, match="2 s"):
            await both.a.dial(both.b.peer, PROTOCOL, timeout_s=2)
        both.network.thaw(both.b.peer)
        await asyncio.sleep(2 * LATENCY_S)
        assert both.theirs.received == b"hello"
        assert both.ours.received == b"from the ice"

    with_pair(scenario)


def test_a_dial_waits_for_a_thaw_within_its_bound() -> None:
    async def scenario(both: Pair) -> None:
        both.network.freeze(both.b.peer)
        dialling = asyncio.create_task(both.a.dial(both.b.peer, PROTOCOL, timeout_s=5))
        await asyncio.sleep(3)
        assert not dialling.done()
        both.network.thaw(both.b.peer)
        assert (await dialling).peer == both.b.peer

    with_pair(scenario)


def test_a_dial_that_is_given_up_leaves_no_stream_behind() -> None:
    async def scenario(both: Pair) -> None:
        accepted: list[Ear] = []
        await both.b.serve("/corolla/late/1", lambda stream: accepted.append(Ear(stream)))
        both.network.partition([both.b.peer], [both.a.peer], one_way=True)
        with pytest.raises(HopFailed):
            await both.a.dial(both.b.peer, "/corolla/late/1", timeout_s=1)
        await asyncio.sleep(1)
        assert accepted[0].closings

    with_pair(scenario)


def test_a_kill_resets_streams_one_latency_later_behind_what_had_left() -> None:
    async def scenario(both: Pair) -> None:
        both.theirs.stream.write([b"last words"])
        both.network.kill(both.b.peer)
        killed_at = now()
        both.theirs.stream.write([b"never said"])
        await asyncio.sleep(1)
        assert both.ours.closings == [(pytest.approx(killed_at + LATENCY_S), "reset by the other side")]
        assert both.ours.received == b"last words"
        assert both.theirs.closed_at == pytest.approx(killed_at)
        assert await both.b.wait_lost() == "the peer was killed"

    with_pair(scenario)


def test_a_kill_behind_a_partition_is_noticed_only_after_it() -> None:
    async def scenario(both: Pair) -> None:
        both.network.partition([both.a.peer], [both.b.peer])
        both.network.kill(both.b.peer)
        await asyncio.sleep(100)
        assert both.ours.closed_at is None
        both.network.heal([both.a.peer], [both.b.peer])
        await asyncio.sleep(1)
        assert both.ours.closed_at is not None

    with_pair(scenario)


def test_killing_a_frozen_peer_resets_its_streams() -> None:
    async def scenario(both: Pair) -> None:
        both.network.freeze(both.b.peer)
        both.theirs.stream.write([b"unsent"])
        await asyncio.sleep(10)
        both.network.kill(both.b.peer)
        await asyncio.sleep(1)
        assert both.ours.closed_at is not None
        assert both.ours.received == b""

    with_pair(scenario)


def test_a_dead_transport_refuses_politely() -> None:
    async def scenario(both: Pair) -> None:
        both.network.kill(both.b.peer)
        with pytest.raises(HopFailed, match="our own transport"):
            await both.b.dial(both.a.peer, PROTOCOL, timeout_s=1)
        with pytest.raises(NoPeers):
            await both.b.join(both.a.addresses, timeout_s=1)
        assert not await both.b.records.put("key", b"value", 10)
        assert [record.value for record in await both.a.records.get("key")] == []

    with_pair(scenario)


def test_a_killed_peer_comes_back_as_the_same_peer_with_nothing_in_hand() -> None:
    async def scenario(both: Pair) -> None:
        both.network.kill(both.b.peer)
        await asyncio.sleep(1)
        async with both.network.transport("b") as again:
            assert again.peer == both.b.peer
            with pytest.raises(HopFailed, match="does not take"):
                await both.a.dial(again.peer, PROTOCOL, timeout_s=1)
            with pytest.raises(HopFailed, match="unknown"):
                await again.dial(identity_of("c").peer, PROTOCOL, timeout_s=1)

    with_pair(scenario)


def test_one_peer_cannot_run_twice() -> None:
    async def scenario(both: Pair) -> None:
        with pytest.raises(BadInput, match="already running"):
            async with both.network.transport("a"):
                raise AssertionError("it started")

    with_pair(scenario)


def test_misuse_of_a_stream_or_protocol_is_our_own_bug() -> None:
    async def scenario(both: Pair) -> None:
        with pytest.raises(LocalProtocolError, match="twice"):
            both.ours.stream.start(lambda data: None, lambda reason: None)
        with pytest.raises(LocalProtocolError, match="already"):
            await both.b.serve(PROTOCOL, lambda stream: stream.close())

    with_pair(scenario)


def test_a_stream_that_ended_before_start_says_so_at_start() -> None:
    async def scenario(both: Pair) -> None:
        accepted: list[ByteStream] = []
        await both.b.serve("/corolla/slow/1", accepted.append)
        stream = await both.a.dial(both.b.peer, "/corolla/slow/1", timeout_s=1)
        stream.write([b"gone soon"])
        await asyncio.sleep(1)
        stream.close()
        await asyncio.sleep(1)
        late = Ear(accepted[0])
        closed = Ear(stream)
        await asyncio.sleep(1)
        assert late.received == b"gone soon"
        assert len(late.closings) == len(closed.closings) == 1

    with_pair(scenario)


def test_peers_that_nobody_introduced_stay_apart() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with (
            network.transport("a") as a,
            network.transport("b") as b,
            network.transport("c") as c,
            network.transport("d") as d,
        ):
            await b.join(a.addresses, timeout_s=1)
            await d.join(c.addresses, timeout_s=1)
            assert await a.records.put("key", b"one", 60)
            assert await d.records.put("key", b"two", 60)
            assert [record.value for record in await b.records.get("key")] == [b"one"]
            assert [record.value for record in await c.records.get("key")] == [b"two"]
            with pytest.raises(HopFailed, match="unknown"):
                await b.ping(d.peer, timeout_s=1)
            await c.join(a.addresses, timeout_s=1)
            assert {record.value for record in await b.records.get("key")} == {b"one", b"two"}
            assert await b.ping(d.peer, timeout_s=1) > 0

    run_virtual(scenario())


def test_after_the_bootstrap_peer_is_gone_the_others_still_find_each_other() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a, network.transport("b") as b:
            await a.join(boot.addresses, timeout_s=1)
            await b.join(boot.addresses, timeout_s=1)
            network.kill(boot.peer)
            assert await a.records.put("key", b"still", 60)
            assert [record.value for record in await b.records.get("key")] == [b"still"]
            with pytest.raises(NoPeers, match=r"memory://.* within 3 s"):
                async with network.transport("late") as late:
                    await late.join(boot.addresses, timeout_s=3)

    run_virtual(scenario())


def test_an_idle_peer_finds_its_bootstrap_peer_again_by_itself() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a:
            await a.join(boot.addresses, timeout_s=1)
            network.kill(boot.peer)
            await asyncio.sleep(300)
            async with network.transport("boot") as again, network.transport("newcomer") as newcomer:
                await newcomer.join(again.addresses, timeout_s=1)
                with pytest.raises(HopFailed, match="unknown"):
                    await newcomer.ping(a.peer, timeout_s=1)
                await asyncio.sleep(16)
                assert await newcomer.ping(a.peer, timeout_s=1) > 0

    run_virtual(scenario())


def test_a_keeper_does_not_replace_a_record_by_an_older_one() -> None:
    async def scenario(both: Pair) -> None:
        assert await both.a.records.put("key", b"new", 60)
        old = sign_record(identity_of("a"), "key", b"old", both.a.wall_time() + 30)
        assert not both.b.records.keep("key", both.a.peer, old)
        both.network.kill(both.a.peer)
        assert [record.value for record in await both.b.records.get("key")] == [b"new"]

    with_pair(scenario)


def test_records_are_split_by_a_partition_and_whole_after_it() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("a") as a, network.transport("b") as b, network.transport("c") as c:
            await b.join(a.addresses, timeout_s=1)
            await c.join(a.addresses, timeout_s=1)
            network.partition([c.peer], [a.peer, b.peer])
            assert await a.records.put("key", b"here", 600)
            assert not await c.records.put("key", b"there", 600)
            assert [record.value for record in await b.records.get("key")] == [b"here"]
            assert [record.value for record in await c.records.get("key")] == [b"there"]
            network.heal([c.peer], [a.peer, b.peer])
            assert len(await b.records.get("key")) == len(await c.records.get("key")) == 2

    run_virtual(scenario())


def test_a_key_keeps_at_most_500_records_and_lets_known_peers_renew() -> None:
    async def scenario(both: Pair) -> None:
        expires_at = both.b.wall_time() + 100
        for number in range(510):
            flooder = identity_of(f"flooder {number}")
            both.b.records.keep("key", flooder.peer, sign_record(flooder, "key", b"junk", expires_at))
        assert len(await both.a.records.get("key")) == 500
        renewing = identity_of("flooder 0")
        assert both.b.records.keep("key", renewing.peer, sign_record(renewing, "key", b"more", expires_at + 1))
        await asyncio.sleep(150)
        assert await both.a.records.put("key", b"after the flood", 60)
        assert [record.value for record in await both.b.records.get("key")] == [b"after the flood"]

    with_pair(scenario)


@given(seed=st.integers(0, 2**32), faults=st.lists(st.sampled_from("pPoOfFgGw"), max_size=12))
def test_whatever_befalls_a_stream_its_bytes_arrive_in_order_and_whole(seed: int, faults: list[str]) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        conditions = LinkConditions(latency_s=0.01, jitter_s=0.02, loss=0.05, bytes_per_s=1e7)
        async with pair(conditions, seed) as both:
            sent = bytearray()
            for fault in faults:
                befall(both, fault)
                chunk = rng.randbytes(rng.choice([1, 100, 70_000, 300_000]))
                both.ours.stream.write([chunk])
                sent += chunk
                await asyncio.sleep(rng.random() / 5)
                assert sent.startswith(both.theirs.received)
            for repair in "POFGw":
                befall(both, repair)
            await asyncio.sleep(120)
            assert both.theirs.received == sent
            assert both.ours.stream.pending_bytes == 0

    run_virtual(main())


def befall(both: Pair, fault: str) -> None:
    """One letter, one fault; the capital letter mends it."""
    a, b, network = both.a.peer, both.b.peer, both.network
    actions: dict[str, Callable[[], None]] = {
        "p": lambda: network.partition([a], [b]),
        "P": lambda: network.heal([a], [b]),
        "o": lambda: network.partition([b], [a], one_way=True),
        "O": lambda: network.heal([b], [a], one_way=True),
        "f": lambda: network.freeze(a),
        "F": lambda: network.thaw(a),
        "g": both.theirs.stream.pause_reading,
        "G": both.theirs.stream.resume_reading,
        "w": lambda: None,
    }
    actions[fault]()


def test_the_same_seed_gives_the_same_run() -> None:
    async def trace(seed: int) -> list[tuple[float, int]]:
        async with pair(LinkConditions(latency_s=0.01, jitter_s=0.05, loss=0.1), seed) as both:
            for _ in range(100):
                both.ours.stream.write([bytes(1000)])
                await asyncio.sleep(0.01)
            await asyncio.sleep(100)
            return both.theirs.arrivals

    assert run_virtual(trace(1)) == run_virtual(trace(1))
    assert run_virtual(trace(1)) != run_virtual(trace(2))


def test_ten_minutes_of_heartbeats_among_ten_peers_do_not_take_ten_minutes() -> None:
    async def scenario() -> int:
        network = MemoryNetwork(random.Random(0), LinkConditions(latency_s=0.02))
        beats = 0

        def count(data: Any) -> None:
            nonlocal beats
            beats += len(data)

        async def beat(stream: MemoryStream) -> None:
            while now() < 600:
                stream.write([b"x"])
                await asyncio.sleep(2)

        async with network.transport("hub") as hub, asyncio.TaskGroup() as group:
            await hub.serve(PROTOCOL, lambda stream: stream.start(count, lambda reason: None))
            for number in range(10):
                peer = await network.transport(f"peer {number}").__aenter__()
                await peer.join(hub.addresses, timeout_s=1)
                group.create_task(beat(await peer.dial(hub.peer, PROTOCOL, timeout_s=1)))
        return beats

    started_at = time.perf_counter()
    assert run_virtual(scenario()) == pytest.approx(3000, abs=20)
    assert time.perf_counter() - started_at < 60
