"""The gate's own bounds, and streams after it: nothing lost, nothing reordered, ends told once."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corolla.errors import BadInput, HopFailed
from corolla.ids import PeerId
from corolla.net import gate as gates
from corolla.net.gate import Gate, GateConfig, load_allowed
from corolla.net.memory.links import MAX_PIECE_BYTES, LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.net.streams import Accept, ByteStream
from corolla.net.swarm_key import SwarmKey

PROTOCOL, OTHER = "/corolla/test/1", "/corolla/other/1"
MEMBER = GateConfig(keys=(SwarmKey(b"k" * 32),))


async def connect(network: MemoryNetwork, accept: Accept) -> tuple[MemoryTransport, MemoryTransport]:
    a, b = network.transport("a", gate=MEMBER), network.transport("b", gate=MEMBER)
    await a.__aenter__()
    await b.__aenter__()
    await b.serve(PROTOCOL, accept)
    await a.join(b.addresses, timeout_s=5)
    return a, b


def in_memory(scenario: Callable[[MemoryNetwork], Any]) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(2))
        await scenario(network)
        for transport in list(network.living.values()):
            await transport.close()

    run_virtual(main())


def test_what_the_listener_says_at_once_arrives_first_and_whole() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        sent = random.Random(3).randbytes(300_000)

        def greet(stream: ByteStream) -> None:
            stream.start(lambda _data: None, lambda _reason: None)
            stream.write([sent])

        a, b = await connect(network, greet)
        stream = await a.dial(b.peer, PROTOCOL, timeout_s=5)
        await asyncio.sleep(1)  # it arrives before anybody listens
        heard, reasons = bytearray(), list[str]()
        stream.start(lambda data: heard.extend(data), reasons.append)
        await asyncio.sleep(1)
        assert bytes(heard) == sent
        stream.close()
        await asyncio.sleep(1)
        assert len(reasons) == 1

    in_memory(scenario)


def test_a_paused_stream_stays_paused_until_resumed() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        taken: list[ByteStream] = []
        a, b = await connect(network, taken.append)
        ours = await a.dial(b.peer, PROTOCOL, timeout_s=5)
        ours.write([b"early"])
        await asyncio.sleep(1)
        heard, reasons = bytearray(), list[str]()
        taken[0].pause_reading()
        taken[0].start(lambda data: heard.extend(data), reasons.append)
        await asyncio.sleep(1)
        assert heard == b""
        taken[0].resume_reading()
        await asyncio.sleep(1)
        assert heard == b"early"
        taken[0].pause_reading()
        ours.write([b", late"])
        await asyncio.sleep(1)
        assert heard == b"early"
        ours.close()
        taken[0].resume_reading()
        await asyncio.sleep(1)
        assert heard == b"early, late"
        assert len(reasons) == 1

    in_memory(scenario)


def test_what_comes_before_the_start_waits_at_the_sender_and_not_here() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        taken: list[ByteStream] = []
        a, b = await connect(network, taken.append)
        ours, sent = await a.dial(b.peer, PROTOCOL, timeout_s=5), random.Random(4).randbytes(5_000_000)
        ours.write([sent])
        await asyncio.sleep(5)
        gated: Any = taken[0]
        assert len(gated._early) <= MAX_PIECE_BYTES
        assert ours.pending_bytes > 4_000_000
        heard = bytearray()
        gated.start(lambda data: heard.extend(data), lambda _reason: None)
        await asyncio.sleep(5)
        assert bytes(heard) == sent

    in_memory(scenario)


def test_a_stream_that_ends_before_its_start_says_so_once_started() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        a, b = await connect(network, lambda stream: stream.close())
        stream = await a.dial(b.peer, PROTOCOL, timeout_s=5)
        await asyncio.sleep(1)
        reasons: list[str] = []
        stream.start(lambda _data: None, reasons.append)
        await asyncio.sleep(1)
        assert len(reasons) == 1

    in_memory(scenario)


def test_a_paused_stream_that_we_close_says_so_once() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        a, b = await connect(network, lambda stream: stream.start(lambda _data: None, lambda _reason: None))
        stream = await a.dial(b.peer, PROTOCOL, timeout_s=5)
        reasons: list[str] = []
        stream.pause_reading()
        stream.start(lambda _data: None, reasons.append)
        stream.close()
        await asyncio.sleep(1)
        assert len(reasons) == 1

    in_memory(scenario)


def test_a_flood_of_silent_strangers_holds_a_bounded_number_of_streams_and_no_member_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "MAX_UNPROVEN", 8)

    async def scenario(network: MemoryNetwork) -> None:
        taken: list[ByteStream] = []
        a, b = await connect(network, taken.append)
        async with network.transport("eve") as eve:
            network.introduce(eve, b)
            ears: list[str] = []
            for _ in range(50):
                stream = await eve._open_stream(b, lambda theirs: b._gate.let_in(theirs, PROTOCOL, taken.append))
                stream.start(lambda _data: None, ears.append)
            assert len(b._gate._waiting) <= 8
            await a.dial(b.peer, PROTOCOL, timeout_s=5)
            await asyncio.sleep(0.1)  # its proof is on its way
            assert [stream.peer for stream in taken] == [a.peer]
            await asyncio.sleep(2 * gates.HANDSHAKE_TIMEOUT_S)
            assert len(ears) == 50
            assert b._gate._waiting == {}
            assert sum(b._gate.refused.values()) == 50
            assert b._gate.refused["no proof in time"] <= 8

    in_memory(scenario)


def test_a_member_far_away_proves_its_key_while_a_stranger_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait are dropped where most wait, not where they wait for longest."""
    monkeypatch.setattr(gates, "MAX_UNPROVEN", 8)

    async def scenario(network: MemoryNetwork) -> None:
        taken: list[ByteStream] = []
        a, b = await connect(network, taken.append)
        network.set_conditions(a.peer, b.peer, LinkConditions(latency_s=0.3))
        async with network.transport("eve") as eve:
            network.introduce(eve, b)
            dial = asyncio.ensure_future(a.dial(b.peer, PROTOCOL, timeout_s=5))
            for _ in range(200):
                stream = await eve._open_stream(b, lambda theirs: b._gate.let_in(theirs, PROTOCOL, taken.append))
                stream.start(lambda _data: None, lambda _reason: None)
                await asyncio.sleep(0.01)
            assert dial.done()
            assert (await dial).peer == b.peer
            await asyncio.sleep(1)
            assert [stream.peer for stream in taken] == [a.peer]

    in_memory(scenario)


def test_a_dial_that_is_given_up_leaves_nothing_behind() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        a, b = await connect(network, lambda stream: stream.start(lambda _data: None, lambda _reason: None))
        dial = asyncio.ensure_future(a.dial(b.peer, PROTOCOL, timeout_s=5))
        await asyncio.sleep(0.0025)  # the stream is open on both sides, the handshake is not done
        assert a._streams
        assert b._streams
        dial.cancel()
        await asyncio.gather(dial, return_exceptions=True)
        await asyncio.sleep(1)
        assert dial.cancelled()
        assert not a._streams
        assert not b._streams

    in_memory(scenario)


def test_without_key_and_list_the_stream_is_the_transports_own() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        async with network.transport("x") as x, network.transport("y") as y:
            taken: list[ByteStream] = []
            await y.serve(PROTOCOL, taken.append)
            network.introduce(x, y)
            stream = await x._open_stream(y, taken.append)
            gate = Gate(x.peer, GateConfig())
            assert await gate.pass_out(stream, PROTOCOL) is stream
            gate.let_in(stream, PROTOCOL, taken.append)
            assert taken[-1] is stream

    in_memory(scenario)


def test_the_wrong_listener_is_named_with_what_is_wrong() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        def answer_nonsense(stream: ByteStream) -> None:
            stream.start(lambda _data: None, lambda _reason: None)
            stream.write([b"\x01" * 1000])

        async with network.transport("x", gate=MEMBER) as x, network.transport("y") as y:
            await y.serve(PROTOCOL, answer_nonsense)
            await y.serve(OTHER, lambda stream: stream.close())
            network.introduce(x, y)
            with pytest.raises(HopFailed, match=r"swarm key .*another"):
                await x.dial(y.peer, PROTOCOL, timeout_s=5)
            with pytest.raises(HopFailed, match=r"swarm key .*open"):
                await x.dial(y.peer, OTHER, timeout_s=5)
            await asyncio.sleep(1)
            assert not x._streams

    in_memory(scenario)


def test_a_list_of_peers_has_one_a_line_and_remarks(tmp_path: Path) -> None:
    first, second = identity_of("a").peer, identity_of("b").peer
    path = tmp_path / "allow"
    path.write_text(f"# friends\n{first}  # Ann's machine\n\n  {second}\n")
    assert load_allowed([path]) == {first, second}
    assert load_allowed([]) is None


@pytest.mark.parametrize("line", ["nobody", "12D3KooW", "/ip4/1.2.3.4/tcp/1/p2p/x", "\x00"])
def test_a_line_that_is_no_peer_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "allow"
    path.write_text(f"{identity_of('a').peer}\n{line}\n")
    with pytest.raises(BadInput, match=rf"{path}, line 2"):
        load_allowed([path])
    with pytest.raises(BadInput, match="cannot be read"):
        load_allowed([tmp_path / "none"])


def test_more_keys_than_a_rotation_needs_are_refused() -> None:
    with pytest.raises(BadInput, match="at most 4"):
        GateConfig(keys=tuple(SwarmKey(bytes([number]) * 32) for number in range(5)))


def test_an_empty_list_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    path.write_text("# nobody yet\n")
    allowed = load_allowed([path])
    assert allowed == frozenset()
    assert not GateConfig(allowed=allowed).allows(PeerId("anyone"))
