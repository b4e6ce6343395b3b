"""What publishing costs on the real DHT, and when it says that somebody else keeps what was published."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from corolla.net.identity import from_seed
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.records import sign_record

pytestmark = pytest.mark.slow
SOON_S = 10.0
KEY = "corolla/1/test"


@asynccontextmanager
async def two_peers() -> AsyncGenerator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
        await a.join(b.addresses, timeout_s=SOON_S)
        yield a, b


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
