"""Whole transports with real daemons: what the seam's own tests (`../test_seam.py`) do not ask."""

import asyncio
import logging
import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec
import pytest
import uvloop

from corolla.errors import BadInput, HopFailed, LocalProtocolError, NoPeers
from corolla.ids import PeerId
from corolla.net.identity import ephemeral, from_seed
from corolla.net.libp2p import membership
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.records import MAX_LIFETIME_S, sign_record
from corolla.net.streams import ByteStream

pytestmark = pytest.mark.slow
Script = Callable[[str], "Popen[str]"]
SOON_S = 10.0
PROTOCOL = "/corolla/test/1"
KEY = "corolla/1/test"


def echo(stream: ByteStream) -> None:
    stream.start(lambda data: stream.write([data]), lambda _reason: None)


async def ask(transport: Libp2pTransport, peer: PeerId, question: bytes) -> bytes:
    """What an echo answers."""
    stream = await transport.dial(peer, PROTOCOL, timeout_s=SOON_S)
    received, is_over = bytearray(), asyncio.Event()

    def on_bytes(data: Any) -> None:
        received.extend(data)
        if len(received) >= len(question):
            is_over.set()

    stream.start(on_bytes, lambda _reason: is_over.set())
    stream.write([question])
    async with asyncio.timeout(SOON_S):
        await is_over.wait()
    stream.close()
    return bytes(received)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def eventually(is_so: Callable[[], Coroutine[Any, Any, bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await is_so():  # noqa: ASYNC110 (what is waited for happens in other processes)
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_client_that_knows_one_peer_reaches_every_server_by_its_id(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            bootstrap = await stack.enter_async_context(open_transport(NetworkConfig()))
            servers = [await stack.enter_async_context(open_transport(NetworkConfig())) for _ in range(3)]
            for server in servers:
                await server.serve(PROTOCOL, echo)
                await server.join(bootstrap.addresses, timeout_s=SOON_S)
                assert await server.records.put(KEY, b"span", 60)
            client = await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))
            assert client.addresses == []
            await client.join(bootstrap.addresses, timeout_s=SOON_S)
            announced = {record.peer for record in await client.records.get(KEY)}
            assert announced == {server.peer for server in servers}
            for server in servers:
                assert await ask(client, server.peer, b"question") == b"question"
                assert await server.ping(client.peer, timeout_s=SOON_S) < 1  # over the client's own connection
            assert await ask(servers[0], servers[1].peer, b"between servers") == b"between servers"
            assert bootstrap.dht_traffic.calls_answered["store"] >= len(servers)
            assert client.dht_traffic.calls_made["find"] > 0
            assert client.dht_traffic.bytes_received >= len(servers) * len(b"span")

    run(scenario())


def test_peers_meet_over_ipv6() -> None:
    async def scenario() -> None:
        async with (
            open_transport(NetworkConfig(listen=("[::1]:0",))) as server,
            open_transport(NetworkConfig(is_client=True)) as client,
        ):
            assert server.addresses[0].startswith("/ip6/::1/tcp/")
            await server.serve(PROTOCOL, echo)
            await client.join(server.addresses, timeout_s=SOON_S)
            assert await ask(client, server.peer, b"six") == b"six"

    asyncio.run(scenario())


def test_a_host_name_can_be_joined() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as server, open_transport(NetworkConfig()) as client:
            by_name = server.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
            await client.join([by_name], timeout_s=SOON_S)
            assert await client.ping(server.peer, timeout_s=SOON_S) > 0

    asyncio.run(scenario())


def test_identity_and_address_stay_over_restarts(short_dir: Path) -> None:
    async def start() -> list[str]:
        config = NetworkConfig(identity=short_dir / "keys" / "identity", listen=(f"127.0.0.1:{port}",))
        async with open_transport(config) as transport:
            return transport.addresses

    port = free_port()
    assert asyncio.run(start()) == asyncio.run(start())


def test_it_works_in_a_background_thread() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as server, open_transport(NetworkConfig(is_client=True)) as client:
            await server.serve(PROTOCOL, echo)
            await client.join(server.addresses, timeout_s=SOON_S)
            answers.append(await ask(client, server.peer, b"from a thread"))

    answers: list[bytes] = []
    for run in (asyncio.run, uvloop.run):
        thread = threading.Thread(target=run, args=(scenario(),))
        thread.start()
        thread.join(30)
    assert answers == [b"from a thread"] * 2


def test_nothing_is_left_after_closing(short_dir: Path, wait_gone: Callable[[int, float], float]) -> None:
    async def scenario() -> None:
        before, tasks_before = len(os.listdir("/proc/self/fd")), asyncio.all_tasks()
        async with open_transport(NetworkConfig(directory=private)) as a, open_transport(NetworkConfig()) as b:
            await a.serve(PROTOCOL, echo)
            await b.join(a.addresses, timeout_s=SOON_S)
            stream, reasons = await b.dial(a.peer, PROTOCOL, timeout_s=SOON_S), list[str]()
            stream.start(lambda _data: None, reasons.append)
            for _ in range(20):
                with pytest.raises(HopFailed):
                    await b.dial(ephemeral().peer, PROTOCOL, timeout_s=1)
            await asyncio.gather(a.close(), a.close())
            await a.close()
            wait_gone(a.daemon_pid, 0.5)
        assert reasons == ["closed by the peer"]
        assert await b.wait_lost() == "the transport was closed"
        assert list(private.iterdir()) == []
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # epoll and the executor's pipe of the loop itself
        assert {task for task in asyncio.all_tasks() - tasks_before if not task.done()} == set()

    private = short_dir / "run"
    asyncio.run(scenario())


def test_when_the_daemon_dies_everything_says_so_at_once() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
            await a.serve(PROTOCOL, echo)
            await b.join(a.addresses, timeout_s=SOON_S)
            stream, reasons = await b.dial(a.peer, PROTOCOL, timeout_s=SOON_S), list[str]()
            stream.start(lambda _data: None, reasons.append)
            os.kill(b.daemon_pid, signal.SIGKILL)
            killed_at = time.monotonic()
            assert "daemon ended" in await b.wait_lost()
            assert len(reasons) == 1
            with pytest.raises(HopFailed):
                await b.dial(a.peer, PROTOCOL, timeout_s=SOON_S)
            with pytest.raises(NoPeers):
                await b.join(a.addresses, timeout_s=0.5)
            assert time.monotonic() - killed_at < 60
            assert not await b.records.put(KEY, b"span", 60)
            assert await b.records.get("corolla/1/other") == []

    asyncio.run(scenario())


async def dial_again_and_again(transport: Libp2pTransport, peer: PeerId) -> None:
    while True:
        (await transport.dial(peer, PROTOCOL, timeout_s=SOON_S)).close()


def test_a_dial_that_fails_of_the_daemons_death_finds_it_said() -> None:
    """Its sockets end a moment before it does; whoever dials in that moment would blame the other side."""

    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
            await a.serve(PROTOCOL, echo)
            await b.join(a.addresses, timeout_s=SOON_S)
            os.kill(b.daemon_pid, signal.SIGKILL)
            with pytest.raises(HopFailed):
                await dial_again_and_again(b, a.peer)
            assert "daemon ended" in (b.lost or "")

    asyncio.run(scenario())


def test_after_an_outage_a_server_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ROUND_S", 0.5)
    monkeypatch.setattr(membership, "LOST_ROUND_S", 0.2)

    async def scenario() -> None:
        boot_config = NetworkConfig(identity=ephemeral(), listen=(f"127.0.0.1:{free_port()}",))
        async with open_transport(NetworkConfig()) as server:
            await server.serve(PROTOCOL, echo)
            async with open_transport(boot_config) as bootstrap:
                await server.join(bootstrap.addresses, timeout_s=SOON_S)
            assert not await server.records.put(KEY, b"span", 60)  # its table is empty now
            await asyncio.sleep(8)
            async with open_transport(boot_config) as bootstrap, open_transport(NetworkConfig()) as newcomer:
                await newcomer.join(bootstrap.addresses, timeout_s=SOON_S)

                async def is_found() -> bool:
                    await server.records.put(KEY, b"span", 60)
                    return [record.peer for record in await newcomer.records.get(KEY)] == [server.peer]

                await eventually(is_found, 5)
                assert await ask(newcomer, server.peer, b"again") == b"again"

    asyncio.run(scenario())


def test_peers_find_each_other_again_although_the_bootstrap_peer_never_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers that know each other only through the swarm; one is away for a while. Were the rounds meanwhile
    dials of the daemon, its back-off would hold up the next one."""
    monkeypatch.setattr(membership, "ROUND_S", 0.5)
    monkeypatch.setattr(membership, "LOST_ROUND_S", 0.2)

    async def scenario() -> None:
        b_config = NetworkConfig(identity=ephemeral(), listen=(f"127.0.0.1:{free_port()}",))
        async with open_transport(NetworkConfig()) as a:
            async with open_transport(NetworkConfig()) as bootstrap, open_transport(b_config) as b:
                for server in (a, b):
                    await server.join(bootstrap.addresses, timeout_s=SOON_S)
                await asyncio.sleep(1.5)  # a round: `a` remembers where it met `b`
            assert not await a.records.put(KEY, b"span", 60)
            await asyncio.sleep(6)  # one failed dial of the daemon, by the line above, costs five seconds
            async with open_transport(b_config) as b:

                async def is_found() -> bool:
                    await a.records.put(KEY, b"span", 60)
                    return [record.peer for record in await b.records.get(KEY)] == [a.peer]

                await eventually(is_found, 5)

    asyncio.run(scenario())


def test_joining_names_every_address_and_the_reason() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a:
            dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{ephemeral().peer}"
            impostor = a.addresses[0].replace(a.peer, ephemeral().peer)
            async with open_transport(NetworkConfig(is_client=True)) as client:
                with pytest.raises(NoPeers) as failed:
                    await client.join([dead, impostor], timeout_s=1)
                for part in (dead, impostor, "1 s", "refused", "peer id mismatch"):
                    assert part in str(failed.value)
                with pytest.raises(BadInput):
                    await client.join(["nonsense"], timeout_s=1)
                with pytest.raises(BadInput):
                    await client.join([], timeout_s=1)
            with pytest.raises(BadInput, match="itself"):
                await a.join(a.addresses, timeout_s=1)

    asyncio.run(scenario())


def test_a_silent_bootstrap_peer_does_not_hold_up_the_join() -> None:
    async def scenario() -> None:
        with socket.socket() as silent:  # takes connections and says nothing
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{ephemeral().peer}"
            async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
                started_at = time.monotonic()
                await b.join([mute, *a.addresses], timeout_s=60)
                assert time.monotonic() - started_at < 60

    asyncio.run(scenario())


def test_an_address_that_swallows_everything_does_not_hide_the_peers_good_one(
    black_hole: Callable[[int], int],
) -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as b:
            await b.join([f"/ip4/127.0.0.2/tcp/{black_hole(0)}/p2p/{a.peer}", *a.addresses], timeout_s=60)
            assert await b.ping(a.peer, timeout_s=SOON_S) > 0

    asyncio.run(scenario())


def test_a_flood_from_an_outsider_is_neither_kept_nor_read() -> None:
    """Unsigned subkeys by the thousand, ten-year expiries, plain values, whole dictionaries, replays."""
    own, accomplice = from_seed(b"m" * 32), from_seed(b"n" * 32)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(open_transport(NetworkConfig())) for _ in range(2)]
            mallory = await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))
            for peer in (b, mallory):
                await peer.join(a.addresses, timeout_s=SOON_S)
            protocol: Any = mallory.records._node.protocol  # pyright: ignore[reportAttributeAccessIssue]
            key_id = hivemind().DHTID.generate(source=KEY)
            far, soon = time.time() + 3e8, time.time() + 60
            rng = random.Random(3)
            dictionary = hivemind().DictionaryDHTValue()
            for number in range(200):
                dictionary.store(f"evil{number}", rng.randbytes(1000), far)
            replayed = msgspec.msgpack.encode(sign_record(own, "corolla/1/other", b"x", soon))
            border = soon - 60 + MAX_LIFETIME_S + 50
            passing = msgspec.msgpack.encode(sign_record(own, KEY, b"just passes", border - 1))
            hiding = msgspec.msgpack.encode(sign_record(accomplice, KEY, b"hides the others", border))
            for target in list(protocol.routing_table.peer_id_to_uid):
                for _ in range(10):
                    names, values = (
                        [f"evil{rng.random()}" for _ in range(200)],
                        [rng.randbytes(1000) for _ in range(200)],
                    )
                    assert not any(await protocol.call_store(target, [key_id] * 200, values, far, subkeys=names) or [])
                assert await protocol.call_store(target, [key_id], [b"plain"], soon) == [False]
                assert await protocol.call_store(target, [key_id], [replayed], soon, subkeys=[own.peer]) == [False]
                assert await protocol.call_store(target, [key_id], [passing], border - 1, subkeys=[own.peer]) == [True]
                await protocol.call_store(target, [key_id], [dictionary], far)
                await protocol.call_store(target, [key_id], [hiding], border, subkeys=[accomplice.peer], in_cache=True)
            assert await b.records.put(KEY, b"span", 60)
            for reader in (a, b, await stack.enter_async_context(open_transport(NetworkConfig(is_client=True)))):
                if reader not in (a, b):
                    await reader.join(a.addresses, timeout_s=SOON_S)
                read = {record.peer: record.value for record in await reader.records.get(KEY)}
                assert read == {b.peer: b"span", own.peer: b"just passes"}

    asyncio.run(scenario())


def test_a_clock_that_is_off_is_reported_once(caplog: pytest.LogCaptureFixture, python: Script) -> None:
    other = python("""
import time
true_time = time.time
time.time = lambda: true_time() + 50
import asyncio
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport

async def main():
    async with open_transport(NetworkConfig()) as transport:
        print(transport.addresses[0], flush=True)
        await transport.records.put("corolla/1/test", b"from the future", 180)
        await asyncio.sleep(600)

asyncio.run(main())
""")
    assert other.stdout is not None
    address = other.stdout.readline().strip()

    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a:
            for _ in range(3):
                await a.join([address], timeout_s=SOON_S)
            assert await a.records.put(KEY, b"from the present", 180)

            async def sees_both() -> bool:
                return len(await a.records.get(KEY)) == 2

            await eventually(sees_both, 5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    reports = [report for report in caplog.records if "clock" in report.getMessage()]
    assert len(reports) == 1
    assert vars(reports[0])["peer_ahead_s"] == pytest.approx(50, abs=2)


def test_a_forked_process_is_told_to_open_its_own() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as transport:
            child = os.fork()
            if child == 0:
                refused = 0
                for attempt in (
                    transport.dial(transport.peer, PROTOCOL, timeout_s=1),
                    transport.join([], timeout_s=1),
                    transport.records.get(KEY),
                ):
                    try:
                        attempt.send(None)
                    except LocalProtocolError:
                        refused += 1
                os._exit(0 if refused == 3 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 (it ends at once)
            assert await transport.records.put(KEY, b"the parent goes on", 60)

    asyncio.run(scenario())


def test_an_answer_that_comes_just_after_its_call_was_cancelled_ends_nothing_else() -> None:
    """Left alone, hivemind's reading task dies of it, and with it every later call, silently."""

    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as transport:
            dht: Any = transport.records
            control: Any = dht._p2p._client.control
            calls = [uuid.uuid4(), uuid.uuid4()]
            cancelled, live = (asyncio.get_running_loop().create_future() for _ in calls)
            control._pending_calls.update(zip(calls, (cancelled, live), strict=True))
            cancelled.cancel()
            reader = asyncio.StreamReader()
            for call in calls:
                answer = hivemind().p2pd_pb2.PersistentConnectionResponse(callId=call.bytes)
                answer.callUnaryResponse.response = b"answer"
                encoded = answer.SerializeToString()
                reader.feed_data(bytes([len(encoded)]) + encoded)
            reader.feed_eof()
            await control._read_from_persistent_conn(reader)
            assert live.result() == b"answer"

    asyncio.run(scenario())


def test_a_frozen_peer_holds_nobody_for_longer_than_said() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as a, open_transport(NetworkConfig()) as frozen:
            await a.join(frozen.addresses, timeout_s=SOON_S)
            os.kill(frozen.daemon_pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)  # until the last of its threads has stopped
            try:
                started_at = time.monotonic()
                with pytest.raises(HopFailed, match="no answer"):
                    await a.ping(frozen.peer, timeout_s=1)
                assert time.monotonic() - started_at < 60
                assert not await a.records.put(KEY, b"span", 60)
                assert time.monotonic() - started_at < 60
            finally:
                os.kill(frozen.daemon_pid, signal.SIGCONT)

    asyncio.run(scenario())
