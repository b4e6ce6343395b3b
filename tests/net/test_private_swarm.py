"""Private swarms on every network: who lacks the key gets no answer, whatever else it knows.

A scenario is `async def (lab)`, run in memory and on real daemons. The lab can do what an attacker does: reach a
peer without joining, and speak raw bytes where an honest peer would prove the key.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from corolla.errors import HopFailed, NoPeers
from corolla.net.gate import HANDSHAKE_TIMEOUT_S, GateConfig
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.stream import SocketStream
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.net.streams import Accept, ByteStream, Transport
from corolla.net.swarm_key import SwarmKey

PROTOCOL = "/corolla/test/1"
KEY = "corolla/1/test"
SOON_S = 5.0
HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES = 48, 65, 32
"""What a dialer says to anybody, what a listener with one key answers, and what the dialer then proves."""
HEAD = b"corolla gate 1\n\x00"
OURS, NEXT, THEIRS = (SwarmKey(letter * 32) for letter in (b"o", b"n", b"t"))
MEMBER = GateConfig(keys=(OURS,))
STRANGER, WRONG = GateConfig(), GateConfig(keys=(THEIRS,))


class Lab(Protocol):
    async def peer(self, name: str, gate: GateConfig) -> Transport: ...

    async def end(self, transport: Transport) -> None:
        """It is gone, so that somebody with its identity can come in its place."""
        ...

    async def approach(self, attacker: Transport, victim: Transport) -> None:
        """Be connected to a peer without asking anything of it that it could refuse."""
        ...

    async def raw_stream(self, attacker: Transport, victim: Transport) -> ByteStream:
        """A stream on which nothing was said, past the attacker's own gate."""
        ...


Scenario = Callable[[Lab], Coroutine[Any, Any, None]]


class MemoryLab:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._network = MemoryNetwork(random.Random(0))
        self._stack = stack

    async def peer(self, name: str, gate: GateConfig) -> MemoryTransport:
        return await self._stack.enter_async_context(self._network.transport(name, gate=gate))

    async def end(self, transport: Transport) -> None:
        await transport.close()

    async def approach(self, attacker: Transport, victim: Transport) -> None:
        self._network.introduce(self._network.living[attacker.peer], self._network.living[victim.peer])

    async def raw_stream(self, attacker: Transport, victim: Transport) -> ByteStream:
        from_, to = self._network.living[attacker.peer], self._network.living[victim.peer]
        accept = to._accepts[PROTOCOL]
        return await from_._open_stream(to, lambda stream: to._gate.let_in(stream, PROTOCOL, accept))


class Libp2pLab:
    def __init__(self, stack: AsyncExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory

    async def peer(self, name: str, gate: GateConfig) -> Libp2pTransport:
        config = NetworkConfig(identity=identity_of(name), gate=gate, directory=self._directory)
        return await self._stack.enter_async_context(open_transport(config))

    async def end(self, transport: Transport) -> None:
        await transport.close()
        await asyncio.sleep(0.3)  # until the others' daemons have seen it

    async def approach(self, attacker: Transport, victim: Transport) -> None:
        assert isinstance(attacker, Libp2pTransport)
        await attacker._control.connect(victim.peer, [victim.addresses[0].partition("/p2p/")[0]], SOON_S)

    async def raw_stream(self, attacker: Transport, victim: Transport) -> ByteStream:
        assert isinstance(attacker, Libp2pTransport)
        raw = await attacker._control.open_stream(victim.peer, PROTOCOL, SOON_S)
        return attacker._hold(SocketStream(raw, attacker._forget))


def run_in_memory(scenario: Scenario) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(MemoryLab(stack))

    run_virtual(main())


def run_on_libp2p(scenario: Scenario) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="cor-") as directory:
            async with AsyncExitStack() as stack:
                await scenario(Libp2pLab(stack, Path(directory)))

    asyncio.run(main())


LABS: dict[str, Callable[[Scenario], None]] = {"memory": run_in_memory, "libp2p": run_on_libp2p}


@pytest.fixture(params=[pytest.param(name, marks=() if name == "memory" else pytest.mark.slow) for name in LABS])
def run_in_lab(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    return LABS[request.param]


def everywhere(scenario: Scenario) -> Callable[[Callable[[Scenario], None]], None]:
    def test(run_in_lab: Callable[[Scenario], None]) -> None:
        run_in_lab(scenario)

    test.__name__ = scenario.__name__
    return test


class Ear:
    """Keeps what one end of a stream hears, until it ends."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.heard = bytearray()
        self.reasons: list[str] = []
        self._news = asyncio.Event()
        stream.start(self._on_bytes, self._on_closed)

    def _on_bytes(self, data: Any) -> None:
        self.heard += data
        self._news.set()

    def _on_closed(self, reason: str) -> None:
        self.reasons.append(reason)
        self._news.set()

    async def until_heard(self, num_bytes: int, within_s: float = SOON_S) -> bytes:
        async with asyncio.timeout(within_s):
            while len(self.heard) < num_bytes and not self.reasons:
                self._news.clear()
                await self._news.wait()
        return bytes(self.heard)

    async def until_closed(self, within_s: float = SOON_S) -> bytes:
        """What was heard in all."""
        async with asyncio.timeout(within_s):
            while not self.reasons:
                self._news.clear()
                await self._news.wait()
        return bytes(self.heard)


def echo(stream: ByteStream) -> None:
    stream.start(lambda data: stream.write([bytes(data)]), lambda _reason: None)


async def ask(dialer: Transport, listener: Transport, question: bytes) -> bytes:
    ear = Ear(await dialer.dial(listener.peer, PROTOCOL, timeout_s=SOON_S))
    ear.stream.write([question])
    answer = await ear.until_heard(len(question))
    ear.stream.close()
    return answer


class Recording:
    """A stream of which all bytes that arrive are kept."""

    def __init__(self, stream: ByteStream, kept: bytearray) -> None:
        self._stream = stream
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def start(self, on_bytes: Callable[[Any], None], on_closed: Callable[[str], None]) -> None:
        def keep(data: Any) -> None:
            self._kept.extend(data)
            on_bytes(data)

        self._stream.start(keep, on_closed)


def record_all(listener: Transport) -> list[bytearray]:
    """What is said to this peer from now on, stream by stream, from the first byte."""
    gate: Any = listener._gate  # pyright: ignore[reportAttributeAccessIssue]
    let_in, said = gate.let_in, list[bytearray]()

    def let_in_recorded(stream: ByteStream, protocol: str, accept: Accept) -> None:
        said.append(bytearray())
        let_in(Recording(stream, said[-1]), protocol, accept)

    gate.let_in = let_in_recorded
    return said


async def values(reader: Transport) -> set[bytes]:
    return {record.value for record in await reader.records.get(KEY)}


async def two_members(lab: Lab, dialer: GateConfig = MEMBER, listener: GateConfig = MEMBER) -> list[Transport]:
    a, b = await lab.peer("a", dialer), await lab.peer("b", listener)
    await b.serve(PROTOCOL, echo)
    await a.join(b.addresses, timeout_s=SOON_S)
    return [a, b]


@everywhere
async def test_members_talk_and_share_records(lab: Lab) -> None:
    a, b = await two_members(lab)
    question = random.Random(1).randbytes(1_000_000)
    assert await ask(a, b, question) == question
    assert await a.ping(b.peer, timeout_s=SOON_S) > 0
    assert await a.records.put(KEY, b"span", 60)
    assert await values(b) == {b"span"}


@everywhere
async def test_while_keys_rotate_members_with_either_key_are_served(lab: Lab) -> None:
    a, b = await two_members(lab, GateConfig(keys=(OURS, NEXT)), GateConfig(keys=(NEXT, OURS)))
    assert await ask(a, b, b"the old key is used") == b"the old key is used"
    assert await a.records.put(KEY, b"from a", 60)
    assert await b.records.put(KEY, b"from b", 60)
    assert await values(a) == await values(b) == {b"from a", b"from b"}
    await a.serve(PROTOCOL, echo)
    assert await ask(b, a, b"the new key is used") == b"the new key is used"


@pytest.mark.parametrize(
    ("a_keys", "b_keys"),
    [
        pytest.param((NEXT, OURS), (OURS,), id="the new one first, before anybody else has it"),
        pytest.param((OURS,), (NEXT, OURS), id="the other way round"),
        pytest.param((OURS, NEXT), (NEXT,), id="the old one first, after somebody has dropped it"),
        pytest.param((NEXT,), (OURS, NEXT), id="the other way round again"),
        pytest.param((THEIRS, OURS), (NEXT, OURS), id="each first has one that the other has not"),
    ],
)
def test_two_peers_that_share_a_key_talk_whatever_the_order(
    run_in_lab: Callable[[Scenario], None], a_keys: tuple[SwarmKey, ...], b_keys: tuple[SwarmKey, ...]
) -> None:
    async def scenario(lab: Lab) -> None:
        a, b = await two_members(lab, GateConfig(keys=a_keys), GateConfig(keys=b_keys))
        await a.serve(PROTOCOL, echo)
        assert await ask(a, b, b"there") == b"there"
        assert await ask(b, a, b"and back") == b"and back"
        assert await a.records.put(KEY, b"from a", 60)
        assert await b.records.put(KEY, b"from b", 60)
        assert await values(a) == await values(b) == {b"from a", b"from b"}

    run_in_lab(scenario)


@pytest.mark.parametrize("outsider", [STRANGER, WRONG], ids=["no key", "wrong key"])
def test_an_outsider_who_knows_every_address_gets_no_answer(
    run_in_lab: Callable[[Scenario], None], outsider: GateConfig
) -> None:
    async def scenario(lab: Lab) -> None:
        a, b = await two_members(lab)
        assert await a.records.put(KEY, b"secret", 60)
        eve = await lab.peer("eve", outsider)
        with pytest.raises(NoPeers, match=r"private|key|nobody"):
            await eve.join([*a.addresses, *b.addresses], timeout_s=1)
        for victim in (a, b):
            await lab.approach(eve, victim)
        assert await values(eve) == set()
        await eve.records.put(KEY, b"forged", 60)
        assert await values(a) == await values(b) == {b"secret"}
        with pytest.raises(HopFailed):
            await eve.ping(b.peer, timeout_s=1)
        for lie in (b"x" * HELLO_BYTES, HEAD + bytes(32 + PROOF_BYTES)):
            ear = Ear(await lab.raw_stream(eve, b))
            ear.stream.write([lie])
            assert len(await ear.until_closed()) in (0, ANSWER_BYTES)
        if outsider.is_private:
            with pytest.raises(HopFailed, match="swarm key"):
                await eve.dial(b.peer, PROTOCOL, timeout_s=SOON_S)
        assert await ask(a, b, b"still well") == b"still well"

    run_in_lab(scenario)


@everywhere
async def test_a_member_does_not_speak_to_a_stranger_in_a_members_place(lab: Lab) -> None:
    a, mallory = await lab.peer("a", MEMBER), await lab.peer("mallory", STRANGER)
    heard: list[Ear] = []
    await mallory.serve(PROTOCOL, lambda stream: heard.append(Ear(stream)))
    await lab.approach(a, mallory)
    with pytest.raises(HopFailed):
        await a.dial(mallory.peer, PROTOCOL, timeout_s=1)
    await asyncio.sleep(0.2)
    assert [len(ear.heard) for ear in heard] == [HELLO_BYTES]


@everywhere
async def test_a_recorded_handshake_is_worth_nothing(lab: Lab) -> None:
    """All that a member said to another, said again by a thief of its identity."""
    a, b = await two_members(lab)
    said = record_all(b)
    assert await ask(a, b, b"question") == b"question"
    (recorded,) = said
    assert len(recorded) == HELLO_BYTES + PROOF_BYTES + len(b"question")
    await lab.end(a)
    thief = await lab.peer("a", STRANGER)
    await lab.approach(thief, b)
    ear = Ear(await lab.raw_stream(thief, b))
    ear.stream.write([recorded])
    assert len(await ear.until_closed()) in (0, ANSWER_BYTES)  # the close may overtake the answer


@everywhere
async def test_the_bootstrap_peers_identity_without_the_key_is_worth_nothing(lab: Lab) -> None:
    boot, a = await lab.peer("boot", MEMBER), await lab.peer("a", MEMBER)
    await a.serve(PROTOCOL, echo)
    await a.join(boot.addresses, timeout_s=SOON_S)
    assert await a.records.put(KEY, b"secret", 60)
    await lab.end(boot)
    for gate in (STRANGER, WRONG):
        thief = await lab.peer("boot", gate)
        heard: list[Ear] = []
        await thief.serve(PROTOCOL, lambda stream, heard=heard: heard.append(Ear(stream)))
        await lab.approach(thief, a)
        assert await values(thief) == set()
        ear = Ear(await lab.raw_stream(thief, a))
        ear.stream.write([HEAD + bytes(32 + PROOF_BYTES)])
        assert len(await ear.until_closed()) in (0, ANSWER_BYTES)  # the close may overtake the answer
        with pytest.raises(HopFailed):
            await a.dial(thief.peer, PROTOCOL, timeout_s=1)
        assert all(len(ear.heard) <= HELLO_BYTES for ear in heard)
        assert await values(a) == {b"secret"}
        await lab.end(thief)


@everywhere
async def test_only_listed_peers_are_served_key_or_not(lab: Lab) -> None:
    listed = frozenset({identity_of("a").peer})
    a, b = await two_members(lab, MEMBER, GateConfig(keys=(OURS,), allowed=listed))
    c = await lab.peer("c", MEMBER)
    assert await b.records.put(KEY, b"secret", 60)
    assert await ask(a, b, b"listed") == b"listed"
    with pytest.raises(NoPeers):
        await c.join(b.addresses, timeout_s=1)
    await lab.approach(c, b)
    assert await values(c) == set()
    with pytest.raises(HopFailed):
        await c.dial(b.peer, PROTOCOL, timeout_s=1)


@everywhere
async def test_a_list_works_without_a_key(lab: Lab) -> None:
    a, b = await two_members(lab, STRANGER, GateConfig(allowed=frozenset({identity_of("a").peer})))
    c = await lab.peer("c", STRANGER)
    await lab.approach(c, b)
    assert await ask(a, b, b"listed") == b"listed"
    ear = Ear(await c.dial(b.peer, PROTOCOL, timeout_s=SOON_S))
    ear.stream.write([b"not listed"])
    assert await ear.until_closed() == b""


@everywhere
async def test_who_says_nothing_or_too_much_is_closed(lab: Lab) -> None:
    a, b = await two_members(lab)
    eve = await lab.peer("eve", STRANGER)
    await lab.approach(eve, b)
    silent, loud = Ear(await lab.raw_stream(eve, b)), Ear(await lab.raw_stream(eve, b))
    loud.stream.write([bytes(1_000_000)])
    assert await loud.until_closed() == b""
    silent.stream.write([HEAD])
    assert await silent.until_closed(within_s=HANDSHAKE_TIMEOUT_S + SOON_S) == b""
    assert await ask(a, b, b"still well") == b"still well"


@everywhere
async def test_a_listeners_own_proof_said_back_to_it_is_none(lab: Lab) -> None:
    _a, b = await two_members(lab)
    eve = await lab.peer("eve", STRANGER)
    await lab.approach(eve, b)
    ear = Ear(await lab.raw_stream(eve, b))
    ear.stream.write([HEAD + bytes(32)])
    answer = await ear.until_heard(ANSWER_BYTES)
    ear.stream.write([answer[-PROOF_BYTES:], b"let me in"])
    assert await ear.until_closed() == answer


@everywhere
async def test_a_stranger_between_two_members_cannot_pass_their_proofs_on(lab: Lab) -> None:
    """Mallory says to each what the other says: were the names not in the proofs, she would be let in at both."""
    a, b = await two_members(lab)
    mallory = await lab.peer("mallory", STRANGER)
    let_in: list[ByteStream] = []
    accept_in_place_of_echo(b, let_in.append)
    passed_on = bytearray()
    relays: list[asyncio.Task[None]] = []

    def relay(stream: ByteStream) -> None:
        relays.append(asyncio.ensure_future(pass_on(stream)))

    async def pass_on(stream: ByteStream) -> None:
        onward = await lab.raw_stream(mallory, b)

        def forth(data: Any) -> None:
            passed_on.extend(data)
            onward.write([bytes(data)])

        def back(data: Any) -> None:
            passed_on.extend(data)
            stream.write([bytes(data)])

        stream.start(forth, lambda _reason: onward.close())
        onward.start(back, lambda _reason: stream.close())

    await mallory.serve(PROTOCOL, relay)
    for member in (a, b):
        await lab.approach(mallory, member)
    with pytest.raises(HopFailed, match="swarm key"):
        await a.dial(mallory.peer, PROTOCOL, timeout_s=SOON_S)
    await asyncio.gather(*relays)
    assert len(passed_on) == HELLO_BYTES + ANSWER_BYTES
    assert let_in == []


def accept_in_place_of_echo(listener: Transport, accept: Accept) -> None:
    """In place of the echo that it serves."""
    accepts: Any = listener._accepts  # pyright: ignore[reportAttributeAccessIssue]
    accepts[PROTOCOL] = accept
