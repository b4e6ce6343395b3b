"""Attacks on the records, tried on real daemons: a fresh client still sees every real server, and soon."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from corolla.ids import PeerId
from corolla.net.identity import Identity, from_seed
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.places import MAX_PER_KEY
from corolla.net.records import sign_record

pytestmark = pytest.mark.slow
KEY = "corolla/1/test"
SOON_S = 5.0
FOREVER_S = 10 * 365 * 86_400.0
ELSEWHERE = "127.5.6.7"
"""Another address group than the others', on the same machine."""


async def store_all(by: Libp2pTransport, records: Sequence[tuple[PeerId, bytes, float]], *, batch: int = 200) -> int:
    """Ask every peer that `by` knows to store these (peer, value, expiry); how many of them were taken."""
    protocol: Any = by.records._node.protocol  # pyright: ignore[reportAttributeAccessIssue]
    key, taken = hivemind().DHTID.generate(source=KEY), 0
    for target in list(protocol.routing_table.peer_id_to_uid):
        for start in range(0, len(records), batch):
            peers, values, expiries = zip(*records[start : start + batch], strict=True)
            answer = await protocol.call_store(
                target, [key] * len(peers), list(values), list(expiries), subkeys=list(peers)
            )
            taken += sum(answer or [])
    return taken


def signed(identity: Identity, value: bytes, expires_at: float) -> tuple[PeerId, bytes, float]:
    return identity.peer, msgspec.msgpack.encode(sign_record(identity, KEY, value, expires_at)), expires_at


def sybils(count: int, first: int = 0) -> list[Identity]:
    return [from_seed(number.to_bytes(32, "big")) for number in range(first + 1, first + count + 1)]


async def seen_by_a_fresh_client(addresses: Sequence[str]) -> dict[PeerId, bytes]:
    """What somebody who knows nothing yet reads under the key; fails when that takes more than five seconds."""
    async with open_transport(NetworkConfig(is_client=True)) as client:
        async with asyncio.timeout(SOON_S):
            await client.join(addresses, timeout_s=SOON_S)
            return {record.peer: record.value for record in await client.records.get(KEY)}


async def swarm(stack: AsyncExitStack, num_servers: int = 2) -> list[Libp2pTransport]:
    """A bootstrap peer and servers that have announced themselves."""
    boot, *servers = [await stack.enter_async_context(open_transport(NetworkConfig())) for _ in range(num_servers + 1)]
    for server in servers:
        await server.join(boot.addresses, timeout_s=SOON_S)
        assert await server.records.put(KEY, b"span", 180)
    return [boot, *servers]


async def attacker(stack: AsyncExitStack, addresses: Sequence[str], host: str = "127.0.0.1") -> Libp2pTransport:
    mallory = await stack.enter_async_context(open_transport(NetworkConfig(listen=(f"{host}:0",))))
    await mallory.join(addresses, timeout_s=SOON_S)
    return mallory


def test_forged_records_and_five_megabytes_of_junk_hide_nobody() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            boot, *servers = await swarm(stack)
            mallory = await attacker(stack, boot.addresses)
            own, rng, now = from_seed(b"m" * 32), random.Random(5), time.time()
            victim = servers[0].peer
            forged = sign_record(own, KEY, b"forged", now + 170)
            packed = msgspec.msgpack.encode
            lies = [
                (victim, packed(forged), now + 170),
                (victim, packed(b"unsigned"), now + 170),
                signed(own, b"for ten years", now + FOREVER_S),
                (own.peer, packed(sign_record(own, "corolla/1/other", b"elsewhere", now + 60)), now + 60),
                (own.peer, packed(sign_record(own, KEY, b"short", now + 60)), now + FOREVER_S),
            ]
            junk = [(PeerId(f"junk {number}"), rng.randbytes(1000), now + FOREVER_S) for number in range(5_300)]
            assert sum(len(value) for _, value, _ in junk) > 5 << 20
            assert await store_all(mallory, lies + junk) == 0
            expected = {server.peer: b"span" for server in servers}
            assert await seen_by_a_fresh_client(boot.addresses) == expected

    asyncio.run(scenario())


def test_an_old_record_replayed_does_not_bring_an_old_state_back() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            boot, server = await swarm(stack, num_servers=1)
            mallory = await attacker(stack, boot.addresses)
            (old,) = await mallory.records.get(KEY)
            protocol: Any = mallory.records._node.protocol  # pyright: ignore[reportAttributeAccessIssue]
            key = hivemind().DHTID.generate(source=KEY)
            found = (await protocol.call_find(hivemind().PeerID.from_base58(boot.peer), [key]))[key][0]
            blob = msgspec.msgpack.encode(found.value.get(server.peer).value)
            assert await server.records.put(KEY, b"draining", 180)
            assert await store_all(mallory, [(server.peer, blob, old.expires_at)]) == 0
            assert await seen_by_a_fresh_client(boot.addresses) == {server.peer: b"draining"}

    asyncio.run(scenario())


@pytest.mark.parametrize("host", [ELSEWHERE, "127.0.0.1"], ids=["from elsewhere", "from the same network"])
def test_a_thousand_signed_identities_displace_nobody_and_keep_nobody_out(host: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            boot, *servers = await swarm(stack)
            for server in servers:
                assert await server.records.put(KEY, b"renewed", 180)
            mallory = await attacker(stack, boot.addresses, host)
            expires_at = time.time() + 170
            flood = [signed(identity, b"sybil" * 100, expires_at) for identity in sybils(1000)]
            assert await store_all(mallory, flood) >= MAX_PER_KEY
            newcomer = await stack.enter_async_context(open_transport(NetworkConfig()))
            await newcomer.join(boot.addresses, timeout_s=SOON_S)
            if host == "127.0.0.1":
                await asyncio.sleep(2)  # this network has taken all the places that it may take from others at once
            assert await newcomer.records.put(KEY, b"new", 180)
            seen = await seen_by_a_fresh_client(boot.addresses)
            assert {seen.get(server.peer) for server in servers} == {b"renewed"}
            assert seen.get(newcomer.peer) == b"new"
            assert len(seen) > 100, "the flood should have been there"

    asyncio.run(scenario())
