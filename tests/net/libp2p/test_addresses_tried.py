"""Which of a peer's addresses the daemon is told to dial, without a daemon: real sockets on loopback."""

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from corolla.ids import PeerId
from corolla.net.identity import from_seed
from corolla.net.libp2p import membership
from corolla.net.libp2p.dht import DhtPing
from corolla.net.libp2p.membership import Membership

BlackHole = Callable[[int], int]
OWN, PEER = from_seed(b"o" * 32).peer, from_seed(b"p" * 32).peer
JOIN_S = 60.0


@dataclass
class FakeControl:
    """Notes what the daemon would dial."""

    dialled: list[str] = field(default_factory=list[str])

    async def connect(self, peer: PeerId, multiaddrs: Sequence[str], timeout_s: float) -> None:
        assert (peer, timeout_s) == (PEER, membership.MEET_TIMEOUT_S)
        self.dialled += multiaddrs


class FakeDht:
    """Every peer that was dialled answers."""

    async def ping(self, _peer: PeerId) -> DhtPing:
        return DhtPing(0.001, 0.0)

    async def explore(self) -> None:
        pass


@pytest.fixture
def good_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def dialled_at(*places: tuple[str, int]) -> list[str]:
    """What is dialled of these (`kind/host`, port) of one peer until it answers."""
    control = FakeControl()
    joined = Membership(OWN, cast("Any", control), cast("Any", FakeDht()), random.Random(0), is_client=False)
    addresses = [f"/{host}/tcp/{port}/p2p/{PEER}" for host, port in places]
    asyncio.run(joined.join(addresses, JOIN_S))
    return control.dialled


def test_an_address_that_swallows_everything_does_not_hide_the_peers_good_one(
    black_hole: BlackHole, good_port: int
) -> None:
    dialled = dialled_at(("ip4/127.0.0.2", black_hole(0)), ("ip4/127.0.0.1", good_port))
    assert f"/ip4/127.0.0.1/tcp/{good_port}" in dialled


def test_what_may_answer_yet_is_dialled_too(black_hole: BlackHole, good_port: int) -> None:
    """The first to answer may be somebody else, in whose network the peer's inner address is taken."""
    silent_port = black_hole(0)
    dialled = dialled_at(("ip4/127.0.0.1", good_port), ("ip4/127.0.0.2", silent_port))
    assert f"/ip4/127.0.0.2/tcp/{silent_port}" in dialled


def test_a_names_dead_address_does_not_hide_its_good_one(
    black_hole: BlackHole, good_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = black_hole(good_port)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_asked, **_named: found)
    assert f"/ip4/127.0.0.1/tcp/{port}" in dialled_at(("dns/two.test", port))


def test_a_name_that_nobody_resolves_does_not_hide_the_peers_good_address(
    good_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_joined = threading.Event()

    def resolve_nothing(*_asked: Any, **_named: Any) -> list[Any]:
        has_joined.wait(JOIN_S)
        raise socket.gaierror("no server answers")

    monkeypatch.setattr(socket, "getaddrinfo", resolve_nothing)
    monkeypatch.setattr(membership, "LOOKUP_S", 0.01)
    monkeypatch.setattr(FakeDht, "explore", lambda _dht: asyncio.sleep(0, has_joined.set()))
    dialled = dialled_at(("dns/silent.test", good_port), ("ip4/127.0.0.1", good_port))
    assert dialled == [f"/ip4/127.0.0.1/tcp/{good_port}"]


def test_a_name_that_is_none_does_not_hide_the_peers_good_address(good_port: int) -> None:
    dialled = dialled_at((f"dns/{'a' * 64}.test", good_port), ("ip4/127.0.0.1", good_port))
    assert dialled == [f"/ip4/127.0.0.1/tcp/{good_port}"]
