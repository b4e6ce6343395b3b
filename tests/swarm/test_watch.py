"""A watcher's view follows the swarm, whatever single peers publish."""

import asyncio
import logging
import random

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from corolla.ids import Fingerprint, PeerId
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.net.records import CLOCK_SKEW_S, Record
from corolla.swarm.announcement import Announcement, ModelEntry, announcement_keys
from corolla.swarm.watch import Watcher, clock_ahead_s, list_models

FINGERPRINT = Fingerprint("0123456789abcdef" * 2)
KEY = announcement_keys(FINGERPRINT)[0]  # readers look under every key for every peer
TEN_YEARS_S = 10 * 365 * 86_400.0


def announcement(start: int, end: int, *, num_blocks: int = 4, announced_at: float = 0.0) -> Announcement:
    return Announcement(
        state="online",
        start=start,
        end=end,
        num_blocks=num_blocks,
        fingerprint=FINGERPRINT,
        model_name="model",
        dtype="float32",
        announced_at=announced_at,
    )


async def join_all(boot: MemoryTransport, *others: MemoryTransport) -> None:
    for other in others:
        await other.join(boot.addresses, timeout_s=5)


def test_the_view_follows_servers_that_come_change_and_expire() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a, network.transport("b") as b:
            await join_all(boot, a, b)
            watcher = Watcher(boot, FINGERPRINT)
            assert not watcher.view.servers
            assert await a.records.put(KEY, announcement(0, 2).encode(), 60)
            assert (await watcher.refresh()).missing_blocks == [2, 3]
            assert await b.records.put(KEY, announcement(2, 4).encode(), 180)
            assert (await watcher.refresh()).missing_blocks == []
            assert watcher.view.servers[b.peer].expires_at == pytest.approx(b.wall_time() + 180, abs=1)
            await asyncio.sleep(61)
            assert (await watcher.refresh()).missing_blocks == [0, 1]

    run_virtual(scenario())


def test_bad_records_cost_only_themselves_and_are_counted() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        values = {
            "honest": announcement(0, 4).encode(),
            "junk": b"\xff\xffjunk",
            "outside": msgspec.msgpack.encode(announcement(0, 5)),
            "other": msgspec.msgpack.encode(msgspec.structs.replace(announcement(0, 4), fingerprint="f" * 32)),
            "deeper": announcement(0, 9, num_blocks=9).encode(),
            "second": announcement(0, 4).encode(),
        }
        async with network.transport("boot") as boot:
            watcher = Watcher(boot, FINGERPRINT)
            peers = {name: network.transport(name) for name in values}
            for name, peer in peers.items():
                await peer.__aenter__()
                await peer.join(boot.addresses, timeout_s=5)
                assert await peer.records.put(KEY, values[name], 60)
            view = await watcher.refresh()
            assert set(view.servers) == {peers["honest"].peer, peers["second"].peer}
            assert sum(watcher.rejected.values()) == 4
            assert len(watcher.rejected) == 4
            for peer in peers.values():
                await peer.close()

    run_virtual(scenario())


def test_keeping_fresh_reads_once_a_period_until_cancelled() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a:
            await join_all(boot, a)
            watcher = Watcher(boot, FINGERPRINT)
            keeping = asyncio.create_task(watcher.keep_fresh(30))
            await asyncio.sleep(1)
            await a.records.put(KEY, announcement(0, 4).encode(), 180)
            await asyncio.sleep(28)
            assert not watcher.view.servers
            await asyncio.sleep(2)
            assert watcher.view.missing_blocks == []
            network.kill(a.peer)
            await asyncio.sleep(180)
            assert not watcher.view.servers
            keeping.cancel()

    run_virtual(scenario())


def test_a_clock_that_is_off_is_reported_once_and_a_right_one_never(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> dict[str, str]:
        network = MemoryNetwork(random.Random(0))
        async with (
            network.transport("boot") as boot,
            network.transport("right") as right,
            network.transport("ahead", clock_skew_s=50) as ahead,
            network.transport("behind", clock_skew_s=-50) as behind,
        ):
            await join_all(boot, right, ahead, behind)
            watcher = Watcher(boot, FINGERPRINT)
            for _ in range(5):
                for server in (right, ahead, behind):
                    said = announcement(0, 4, announced_at=server.wall_time())
                    assert await server.records.put(KEY, said.encode(), 180)
                await asyncio.sleep(10)
                assert len((await watcher.refresh()).servers) == 3
                await asyncio.sleep(20)
            return {"ahead": ahead.peer[-8:], "behind": behind.peer[-8:]}

    with caplog.at_level(logging.WARNING, "corolla.swarm.watch"):
        peers = run_virtual(scenario())
    reported = {record.__dict__["peer"]: record.__dict__["ahead_s"] for record in caplog.records}
    assert len(caplog.records) == 2
    assert 35 <= reported[peers["ahead"]] <= 50
    assert -50 <= reported[peers["behind"]] <= -20


@given(ahead_s=st.floats(-1e9, 1e11) | st.sampled_from([CLOCK_SKEW_S + 1, 3600.0, TEN_YEARS_S]))
@example(ahead_s=CLOCK_SKEW_S - 1)
@example(ahead_s=TEN_YEARS_S)
@settings(max_examples=20, deadline=None)
def test_an_announcement_from_the_future_is_dropped_and_counted_beyond_what_clocks_may_differ(ahead_s: float) -> None:
    assume(abs(ahead_s - CLOCK_SKEW_S) > 0.9)  # reading takes a while

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a:
            await join_all(boot, a)
            watcher = Watcher(boot, FINGERPRINT)
            said = announcement(0, 4, announced_at=min(1e11, max(0.0, a.wall_time() + ahead_s)))
            assert await a.records.put(KEY, said.encode(), 180)
            is_tolerated = said.announced_at - boot.wall_time() < CLOCK_SKEW_S
            assert set((await watcher.refresh()).servers) == ({a.peer} if is_tolerated else set())
            assert watcher.rejected == ({} if is_tolerated else {"dated in the future": 1})

    run_virtual(scenario())


def test_a_clock_that_is_too_far_ahead_is_named_when_its_server_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a", clock_skew_s=90) as a:
            await join_all(boot, a)
            watcher = Watcher(boot, FINGERPRINT)
            assert await a.records.put(KEY, announcement(0, 4, announced_at=a.wall_time()).encode(), 180)
            for _ in range(2):
                assert not (await watcher.refresh()).servers

    with caplog.at_level(logging.WARNING, "corolla.swarm.watch"):
        run_virtual(scenario())
    [record] = caplog.records
    assert record.__dict__["ahead_s"] == pytest.approx(90, abs=1)


@pytest.mark.parametrize(
    ("announced_at", "unseen_s", "ahead_s"),
    [(108.0, None, 8.0), (100.0, None, 0.0), (40.0, None, 0.0), (95.0, 10.0, 0.0), (60.0, 30.0, -10.0)],
)
def test_how_far_ahead_a_clock_must_be(announced_at: float, unseen_s: float | None, ahead_s: float) -> None:
    assert clock_ahead_s(announced_at, 100.0, unseen_s) == pytest.approx(ahead_s)


def test_models_are_listed_once_under_their_commonest_name() -> None:
    other = Fingerprint("f" * 32)

    def record(peer: str, value: bytes) -> Record:
        return Record(PeerId(peer), value, expires_at=0.0)

    def entry(name: str, fingerprint: Fingerprint) -> bytes:
        return ModelEntry(name=name, fingerprint=fingerprint, num_blocks=30).encode()

    listed = list_models(
        [
            record("a", entry("smol", FINGERPRINT)),
            record("b", entry("my copy", FINGERPRINT)),
            record("c", entry("smol", FINGERPRINT)),
            record("d", entry("smol", other)),
            record("e", b"junk"),
            record("f", msgspec.msgpack.encode(["evil\x1b[2J", other, 30])),
        ]
    )
    assert [(model.name, model.fingerprint) for model in listed] == [("smol", FINGERPRINT), ("smol", other)]


def test_a_reading_that_fails_costs_no_server_that_has_not_expired() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a, network.transport("w") as reader:
            await join_all(boot, a, reader)
            watcher = Watcher(reader, FINGERPRINT)
            await a.records.put(KEY, announcement(0, 4).encode(), 120)
            await watcher.refresh()
            network.partition([reader.peer], [boot.peer, a.peer])
            reader.records.forget_all()  # else the copy that it keeps itself, one of three peers, would be found
            assert set((await watcher.refresh()).servers) == {a.peer}
            await asyncio.sleep(121)
            assert not (await watcher.refresh()).servers

    run_virtual(scenario())


def test_one_key_of_several_that_cannot_be_read_costs_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = set[str]()

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a, network.transport("b") as b:
            await join_all(boot, a, b)
            read, watcher = boot.records.get, Watcher(boot, FINGERPRINT)

            async def get(key: str) -> list[Record]:
                """As hivemind's does: what nobody answers in time is empty. What we publish, we hold."""
                return [found for found in await read(key) if key not in failing or found.peer == boot.peer]

            monkeypatch.setattr(boot.records, "get", get)
            keys = announcement_keys(FINGERPRINT)
            for server, key in ((a, keys[0]), (b, keys[1]), (boot, keys[1])):
                said = announcement(0, 4, announced_at=server.wall_time())
                assert await server.records.put(key, said.encode(), 120)
            everybody = {a.peer, b.peer, boot.peer}
            assert set((await watcher.refresh()).servers) == everybody
            for key in keys[:2]:
                failing.add(key)
                await asyncio.sleep(10)
                for server, own in ((a, keys[0]), (b, keys[1])):  # published before the reading that fails
                    said = announcement(0, 3, announced_at=server.wall_time())
                    assert await server.records.put(own, said.encode(), 120)
                await asyncio.sleep(10)
                assert set((await watcher.refresh()).servers) == everybody
                failing.clear()
                assert set((await watcher.refresh()).servers) == everybody
                assert watcher.view.servers[b.peer].end == 3
            left = msgspec.structs.replace(announcement(0, 4), state="left")
            await a.records.put(keys[0], left.encode(), 180)
            failing.add(keys[1])
            assert set((await watcher.refresh()).servers) == {b.peer, boot.peer}
            await asyncio.sleep(121)
            assert not (await watcher.refresh()).servers

    with caplog.at_level(logging.WARNING, "corolla.swarm.watch"):
        run_virtual(scenario())
    assert not caplog.records  # whoever could not be read has no clock that is off


def test_a_server_that_left_is_gone_even_when_it_was_the_only_one() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a:
            await join_all(boot, a)
            watcher = Watcher(boot, FINGERPRINT)
            await a.records.put(KEY, announcement(0, 4).encode(), 120)
            assert (await watcher.refresh()).servers
            left = msgspec.structs.replace(announcement(0, 4), state="left")
            await a.records.put(KEY, left.encode(), 180)
            assert not (await watcher.refresh()).servers

    run_virtual(scenario())


def test_the_view_survives_the_loss_of_the_bootstrap_peer_and_newcomers_join_by_others() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with (
            network.transport("boot") as boot,
            network.transport("a") as a,
            network.transport("b") as b,
            network.transport("w") as reader,
        ):
            await join_all(boot, a, reader)
            watcher = Watcher(reader, FINGERPRINT)
            await a.records.put(KEY, announcement(0, 4).encode(), 180)
            network.kill(boot.peer)
            assert set((await watcher.refresh()).servers) == {a.peer}
            await join_all(a, b)
            await b.records.put(KEY, announcement(0, 4).encode(), 180)
            assert set((await watcher.refresh()).servers) == {a.peer, b.peer}

    run_virtual(scenario())


def test_after_an_outage_the_view_is_fresh_again_without_anybodys_help() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("a") as a, network.transport("w") as reader:
            await join_all(boot, a, reader)
            watcher = Watcher(reader, FINGERPRINT)
            keeping = asyncio.create_task(watcher.keep_fresh(10))
            network.partition([reader.peer], [boot.peer, a.peer])
            await a.records.put(KEY, announcement(0, 4).encode(), 180)
            await asyncio.sleep(60)
            assert not watcher.view.servers
            network.heal([reader.peer], [boot.peer, a.peer])
            await asyncio.sleep(30)
            assert set(watcher.view.servers) == {a.peer}
            keeping.cancel()

    run_virtual(scenario())
