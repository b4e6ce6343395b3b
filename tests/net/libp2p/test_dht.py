"""What publishing and reading cost on the real DHT, what is read, and when somebody else keeps what was published."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from corolla.net.identity import from_seed
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.records import REPLICAS, sign_record

pytestmark = pytest.mark.slow
SOON_S = 10.0
KEY = "corolla/1/test"


@asynccontextmanager
async def two_peers() -> AsyncGenerator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
        await a.join(b.addresses, timeout_s=SOON_S)
        yield a, b


async def reader_and_keepers(stack: AsyncExitStack) -> tuple[Libp2pTransport, list[Libp2pTransport]]:
    """A client, and as many peers as keep a record; each of these keeps a hundred."""
    keepers = [await stack.enter_async_context(open_transport(NetworkConfig())) for _ in range(REPLICAS)]
    reader = await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))
    assert not await reader.records.get(KEY), "it knows nobody yet, so this is no first reading"
    for peer in (*keepers[1:], reader):
        await peer.join(keepers[0].addresses, timeout_s=SOON_S)
    for keeper in keepers:
        keep_records_of_others(keeper, 100)
    return reader, keepers


class LotFor(random.Random):
    """Falls on these."""

    def __init__(self, peers: Sequence[Libp2pTransport]) -> None:
        super().__init__(0)
        self.peers = [peer.peer for peer in peers]
        self.drawn = 0

    def sample(self, population: Sequence[Any], k: int, *, counts: Any = None) -> list[Any]:
        self.drawn += 1
        return [peer for peer in population if peer.to_base58() in self.peers][:k]


def shelf(peer: Libp2pTransport) -> Any:
    """What hivemind's node stores into and answers from."""
    return peer.records._node.protocol.storage  # pyright: ignore[reportAttributeAccessIssue]


def keep_records_of_others(peer: Libp2pTransport, count: int) -> None:
    key_id, expires_at = hivemind().DHTID.generate(source=KEY), time.time() + 300
    for number in range(count):
        other = from_seed(number.to_bytes(32, "big"))
        blob = sign_record(other, KEY, bytes(400), expires_at)
        assert shelf(peer).store_subkey(key_id, other.peer, msgspec.msgpack.encode(blob), expires_at)


def test_a_put_costs_no_more_where_many_others_announce_under_its_key() -> None:
    async def bytes_of_a_put(peer: Libp2pTransport) -> int:
        traffic = peer.dht_traffic
        before = traffic.bytes_sent + traffic.bytes_received
        assert await peer.records.put(KEY, b"span", 60)
        return traffic.bytes_sent + traffic.bytes_received - before

    async def scenario() -> None:
        async with two_peers() as (a, b):
            assert await a.records.put(KEY, b"span", 60)
            alone = await bytes_of_a_put(a)
            keep_records_of_others(b, 100)
            assert await bytes_of_a_put(a) < alone + 1000
            assert len(await a.records.get(KEY)) == 101

    asyncio.run(scenario())


def test_a_reading_takes_three_copies_of_what_lies_under_a_key_and_not_eight() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            reader, _ = await reader_and_keepers(stack)
            taken, traffic = list[int](), reader.dht_traffic
            for _ in range(3):
                before = traffic.bytes_received
                assert len(await reader.records.get(KEY)) == 100
                taken.append(traffic.bytes_received - before)
            first, *later = taken
            assert max(later) < 0.5 * first, "the first asks all eight"

    asyncio.run(scenario())


def test_keepers_that_lack_records_or_leave_some_out_hide_none_of_them() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            reader, keepers = await reader_and_keepers(stack)
            assert len(await reader.records.get(KEY)) == 100
            for keeper in keepers[2:]:
                keep_records_of_others(keeper, 130)
            lot = LotFor(keepers[:3])
            reader.records._readings._rng = lot  # pyright: ignore[reportAttributeAccessIssue]
            assert len(await reader.records.get(KEY)) == 130, "two of three lack the new ones"
            for keeper in keepers[:3]:
                shelf(keeper)._keys.clear()
                keep_records_of_others(keeper, 60)
            assert len(await reader.records.get(KEY)) == 130, "all three leave out what was there before"
            for keeper in keepers[:3]:
                shelf(keeper)._keys.clear()
            assert len(await reader.records.get(KEY)) == 130, "all three have nothing"
            assert lot.drawn == 3

    asyncio.run(scenario())


def test_a_keeper_that_gives_no_answer_has_the_others_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            reader, keepers = await reader_and_keepers(stack)
            assert len(await reader.records.get(KEY)) == 100
            for keeper in keepers[3:]:
                keep_records_of_others(keeper, 101)
            reader.records._readings._rng = LotFor(keepers[:3])  # pyright: ignore[reportAttributeAccessIssue]
            assert len(await reader.records.get(KEY)) == 100
            key_id, get_kept = hivemind().DHTID.generate(source=KEY), shelf(keepers[0]).get

            def fail(key: int) -> Any:
                if key == key_id:
                    raise OSError("no disk")
                return get_kept(key)

            monkeypatch.setattr(shelf(keepers[0]), "get", fail)
            assert len(await reader.records.get(KEY)) == 101

    asyncio.run(scenario())


def test_a_peer_that_refuses_a_record_does_not_count_as_keeping_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with two_peers() as (a, b):
            assert await a.records.put(KEY, b"span", 60)
            with monkeypatch.context() as patched:
                patched.setattr(shelf(b), "store_subkey", lambda *_args: False)
                assert not await a.records.put(KEY, b"span", 60)
            assert await a.records.put(KEY, b"span", 60)

    asyncio.run(scenario())


def test_after_joining_it_is_read_back_until_another_peer_shows_it_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with two_peers() as (a, b):
            key_id, asked = hivemind().DHTID.generate(source=KEY), list[int]()
            get_kept = shelf(b).get

            def get_counted(key: int, *, is_hidden: bool = False) -> Any:
                asked.append(key)
                return None if is_hidden else get_kept(key)

            monkeypatch.setattr(shelf(b), "get", lambda key: get_counted(key, is_hidden=True))
            assert not await a.records.put(KEY, b"span", 60)
            monkeypatch.setattr(shelf(b), "get", get_counted)
            assert await a.records.put(KEY, b"span", 60)
            assert asked.count(key_id) == 2
            assert await a.records.put(KEY, b"span", 60)
            assert asked.count(key_id) == 2

    asyncio.run(scenario())
