"""Dialling back: what a helper tries and what it leaves alone, and what people are told of it."""

import asyncio
import datetime as dt
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from corolla.errors import HopFailed
from corolla.ids import PeerId
from corolla.net import reach
from corolla.net.gate import GateConfig
from corolla.net.identity import Identity, ephemeral, from_seed, peer_id_bytes
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.probe import probe
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.net.reach import ReachAsked, Verdict, ask, why_not_dial
from corolla.net.reachable import Report, check_reachable, judge
from corolla.net.streams import ByteStream
from corolla.net.swarm_key import new_key

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/x"
SOON_S = 10.0
VICTIM = from_seed(b"v" * 32)
KEY_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")


def reports(*words: Verdict, seen_from: str | None = "198.51.100.7") -> list[Report]:
    return [Report(seen_from, {ADDRESS: word}) for word in words]


# What people are told


@pytest.mark.parametrize(
    ("found", "state", "says", "advises"),
    [
        (reports("refused", "reached"), "ok", "1 peer dialled back", ""),
        (reports("refused"), "bad", "refused", "forward TCP port 31337"),
        (reports("silent", "refused"), "bad", "no answer", "firewall"),
        (reports("other"), "bad", "another peer or program", "--announce 198.51.100.7:31337"),
        (reports("loopback"), "bad", "only this machine", "--listen 0.0.0.0:31337"),
        (reports("private", seen_from="8.8.8.8"), "bad", "at 8.8.8.8", "--announce 8.8.8.8:31337"),
        (reports("private", seen_from="192.168.1.9"), "unsure", "could judge", "again"),
        (reports("busy", "unknown"), "unsure", "could judge", "again"),
        ([], "unsure", "no peer was there", "another machine"),
    ],
)
def test_every_outcome_says_what_it_is_and_what_to_do(found: list[Report], state: str, says: str, advises: str) -> None:
    finding = judge([ADDRESS], found)
    assert finding.state == state
    assert says in finding.text
    assert advises in finding.next_step


def test_one_reached_address_of_two_is_enough_and_is_named() -> None:
    other = ADDRESS.replace("31337", "31338")
    finding = judge([ADDRESS, other], [Report("198.51.100.7", {ADDRESS: "refused", other: "reached"})])
    assert finding.state == "ok"
    assert other in finding.text
    assert ADDRESS not in finding.text


# What a helper leaves alone


@pytest.mark.parametrize(
    ("host", "source", "verdict"),
    [
        ("203.0.113.5", "203.0.113.5", None),
        ("192.168.1.4", "192.168.1.4", None),
        ("127.0.0.1", "127.0.0.1", None),
        ("8.8.8.8", "9.9.9.9", None),
        ("2606:4700::1", "9.9.9.9", None),
        ("127.0.0.1", "203.0.113.5", "loopback"),
        ("::1", "203.0.113.5", "loopback"),
        ("127.0.0.1", None, "loopback"),
        ("192.168.1.1", "192.168.1.4", "private"),
        ("10.0.0.1", "203.0.113.5", "private"),
        ("169.254.169.254", "203.0.113.5", "private"),
        ("fe80::1", "203.0.113.5", "private"),
        ("fc00::1", None, "private"),
        ("0.0.0.0", "203.0.113.5", "private"),
        ("100.64.0.1", "203.0.113.5", "private"),
        ("224.0.0.1", "203.0.113.5", "private"),
        ("::ffff:10.0.0.1", "203.0.113.5", "private"),
    ],
)
def test_a_helper_dials_only_where_the_asker_comes_from_or_the_public_internet(
    host: str, source: str | None, verdict: Verdict | None
) -> None:
    assert why_not_dial(host, source) == verdict


class Dialled:
    """A helper's probe that only notes what it was asked to dial."""

    def __init__(self) -> None:
        self.hosts: list[str] = []

    async def __call__(self, host: str, _address: str, _peer: PeerId) -> Verdict:
        self.hosts.append(host)
        return "reached"


async def locate(address: str) -> Sequence[str]:
    return [address]


def judge_all(helper: reach.Helper, source: str | None, *addresses: str, asker: str = "asker") -> Any:
    return helper._judge_all(PeerId(asker), source, addresses)


def test_a_helper_cannot_be_made_to_flood_one_target_or_to_work_for_one_asker() -> None:
    async def scenario() -> None:
        dialled = Dialled()
        helper = reach.Helper(lambda _peer: None, locate, dialled)
        verdicts: list[Verdict] = []
        for number in range(50):
            verdicts += await judge_all(helper, f"9.9.{number}.9", "8.8.8.8", asker=f"sybil {number}")
        assert dialled.hosts == ["8.8.8.8"] * 2
        assert set(verdicts) == {"reached", "busy"}
        for _ in range(50):
            await judge_all(helper, "9.9.200.9", "9.9.200.9", asker="one")
        assert dialled.hosts.count("9.9.200.9") == reach.PEER_RATE.burst
        for number in range(50):
            await judge_all(helper, "9.9.201.9", "9.9.201.9", asker=f"of one network {number}")
        assert dialled.hosts.count("9.9.201.9") == reach.GROUP_RATE.burst
        await asyncio.sleep(10)
        await judge_all(helper, "9.9.200.9", "9.9.200.9", asker="one")
        assert dialled.hosts.count("9.9.200.9") == reach.PEER_RATE.burst + 1

    run_virtual(scenario())


def test_a_name_that_leads_into_a_private_network_is_not_dialled() -> None:
    async def leads_home(_address: str) -> Sequence[str]:
        return ["192.168.1.1"]

    async def scenario() -> None:
        dialled = Dialled()
        helper = reach.Helper(lambda _peer: None, leads_home, dialled)
        assert await judge_all(helper, "9.9.9.9", "/dns4/evil.example/tcp/80/p2p/x") == ["private"]
        assert dialled.hosts == []

    run_virtual(scenario())


def test_a_target_that_hangs_is_given_up_and_called_silent() -> None:
    async def hang(_host: str, _address: str, _peer: PeerId) -> Verdict:
        await asyncio.sleep(1000)
        return "reached"

    async def scenario() -> None:
        helper = reach.Helper(lambda _peer: None, locate, hang)
        assert await judge_all(helper, "9.9.9.9", "9.9.9.9") == ["silent"]

    run_virtual(scenario())


# Over a network


async def two(network: MemoryNetwork, stack: AsyncExitStack) -> tuple[MemoryTransport, MemoryTransport]:
    a, b = [await stack.enter_async_context(network.transport(name)) for name in "ab"]
    await a.join(b.addresses, timeout_s=5)
    return a, b


def test_in_memory_a_hidden_peer_is_told_and_others_are_not() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        async with AsyncExitStack() as stack:
            a, b = await two(network, stack)
            assert (await check_reachable(a)).state == "ok"
            network.hide(a.peer)
            finding = await check_reachable(a)
            assert finding.state == "bad"
            assert (await check_reachable(b)).state == "ok"

    run_virtual(scenario())


def test_alone_nobody_can_tell_and_listening_nowhere_is_bad() -> None:
    async def scenario() -> None:
        async with MemoryNetwork(random.Random(1)).transport("a") as a:
            assert (await check_reachable(a)).state == "unsure"
            finding = await check_reachable(a, [])
            assert finding.state == "bad"
            assert "--listen" in finding.next_step

    run_virtual(scenario())


@pytest.mark.parametrize("letter", [b"", b"\x00\x05abc", b"\xff\xff" + bytes(100_000), b"\x00\x01\x90 and more"])
def test_a_helper_that_answers_nonsense_is_a_failed_hop_in_time(letter: bytes) -> None:
    def answer(stream: ByteStream) -> None:
        stream.start(lambda _data: None, lambda _reason: None)
        stream.write([letter])
        asyncio.get_running_loop().call_later(1, stream.close)

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        async with AsyncExitStack() as stack:
            a, b = await two(network, stack)
            b._accepts[reach.PROTOCOL] = answer
            with pytest.raises(HopFailed):
                await ask(a, b.peer, ["x"])
            assert (await check_reachable(a)).state == "unsure"

    run_virtual(scenario())


@pytest.mark.parametrize(
    "question",
    [b"", b"\x00", b"\xff\xff" + bytes(70_000), b"\x00\x03abc", msgspec.msgpack.encode(["x"] * 1000)],
)
def test_an_asker_that_says_nonsense_is_closed_and_holds_nothing(question: bytes) -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        async with AsyncExitStack() as stack:
            a, b = await two(network, stack)
            stream, ended = await a.dial(b.peer, reach.PROTOCOL, timeout_s=5), list[str]()
            stream.start(lambda _data: None, ended.append)
            stream.write([question])
            await asyncio.sleep(reach.ANSWER_TIMEOUT_S + 1)
            assert len(ended) == 1
            assert not b._helper._helping

    run_virtual(scenario())


def test_a_question_holds_no_more_addresses_than_are_answered() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(ReachAsked(["x"] * 5)), type=ReachAsked)


# Real daemons


async def a_pair(stack: AsyncExitStack, config: NetworkConfig, helper: NetworkConfig) -> list[Libp2pTransport]:
    pair = [await stack.enter_async_context(open_transport(each)) for each in (config, helper)]
    await pair[0].join(pair[1].addresses, timeout_s=SOON_S)
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("gate", [GateConfig(), GateConfig(keys=(new_key(),))], ids=["open", "private"])
def test_a_real_peer_is_dialled_back(run: Callable[..., None], gate: GateConfig) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            server, helper = await a_pair(stack, NetworkConfig(gate=gate), NetworkConfig(gate=gate))
            finding = await check_reachable(server)
            assert finding.state == "ok"
            assert server.addresses[0] in finding.text
            assert await ask(server, helper.peer, server.addresses) == (
                "127.0.0.1",
                dict.fromkeys(server.addresses, "reached"),
            )

    run(scenario())


@pytest.mark.slow
def test_what_real_peers_find_at_wrong_addresses() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            server, helper = await a_pair(stack, NetworkConfig(), NetworkConfig())
            mute, loud, free = (stack.enter_context(socket.socket()) for _ in range(3))
            for listening in (mute, loud, free):
                listening.bind(("127.0.0.1", 0))
            mute.listen()
            web = await asyncio.start_server(lambda _reader, writer: writer.write(b"HTTP/1.1 400 Bad\r\n"), sock=loud)
            stack.push_async_callback(web.wait_closed)
            stack.callback(web.close)

            def at(port: int, host: str = "127.0.0.1", peer: PeerId = server.peer) -> str:
                return f"/ip4/{host}/tcp/{port}/p2p/{peer}"

            def port_of(transport: Libp2pTransport) -> int:
                return int(transport.addresses[0].split("/")[4])

            expected: dict[str, Verdict] = {
                at(mute.getsockname()[1]): "silent",
                at(loud.getsockname()[1]): "other",
                at(free.getsockname()[1]): "refused",
                at(port_of(helper)): "other",
            }
            assert (await ask(server, helper.peer, list(expected)))[1] == expected
            more: dict[str, Verdict] = {
                at(port_of(server), host="127.9.9.9"): "loopback",
                at(port_of(server), host="192.168.77.77"): "private",
                at(port_of(helper), peer=helper.peer): "other",
                "nonsense": "refused",
            }
            assert (await ask(server, helper.peer, list(more)))[1] == more
            finding = await check_reachable(server, [at(free.getsockname()[1])])
            assert finding.state == "bad"
            assert "refused" in finding.text

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_listener_is_who_its_own_key_says_not_who_is_asked_for() -> None:
    async def scenario() -> None:
        async with open_transport(NetworkConfig()) as server, open_transport(NetworkConfig(listen=("[::1]:0",))) as six:
            address, stranger = server.addresses[0], ephemeral().peer
            assert await probe("127.0.0.1", address, server.peer) == "reached"
            assert await probe("::1", six.addresses[0], six.peer) == "reached"
            assert await probe("127.0.0.1", address.replace(server.peer, stranger), stranger) == "other"

    asyncio.run(scenario())


def forged_certificate(directory: Path, extension: bytes) -> ssl.SSLContext:
    """A TLS listener's own certificate, with this in place of a peer key and its signature."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mallory")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.UnrecognizedExtension(KEY_EXTENSION, extension), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = directory / "mallory.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


def signed_key(identity: Identity, signature: bytes) -> bytes:
    key = peer_id_bytes(identity.peer)[2:]
    return bytes([0x30, 2 + len(key) + 2 + 64, 4, len(key)]) + key + bytes([4, 64]) + signature


@pytest.mark.parametrize(
    "extension",
    [
        pytest.param(signed_key(VICTIM, bytes(64)), id="no signature"),
        pytest.param(signed_key(VICTIM, VICTIM.sign(b"libp2p-tls-handshake:another key")), id="of another certificate"),
        pytest.param(signed_key(VICTIM, bytes(64))[:-1], id="cut off"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_certificate_that_only_names_the_peer_proves_nothing(tmp_path: Path, extension: bytes) -> None:
    context = forged_certificate(tmp_path, extension)
    met: list[int] = []

    async def pose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n")
        await reader.readexactly(32)
        await writer.start_tls(context)
        met.append(1)

    async def scenario() -> None:
        async with await asyncio.start_server(pose, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await probe("127.0.0.1", f"/ip4/127.0.0.1/tcp/{port}/p2p/{VICTIM.peer}", VICTIM.peer) == "other"
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert met, "the attack did not get as far as the certificate"
