"""Whom a peer asks each round whether they are still there: a client few, and all that it can before it is lost."""

import logging
import random
from collections.abc import Callable, Collection
from typing import Any, cast

import pytest

from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.identity import from_seed
from corolla.net.libp2p import membership
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.dht import DhtPing
from corolla.net.libp2p.membership import Membership
from corolla.net.memory.loop import run_virtual

OWN, BOOT, *OTHERS = [from_seed(number.to_bytes(32, "big")).peer for number in range(1, 19)]


class Swarm:
    """Both of the peer's ways to the others: who lives answers, and who was asked is noted."""

    def __init__(self) -> None:
        self.living: Collection[PeerId] = {BOOT, *OTHERS}
        self.asked: list[PeerId] = []

    async def connected_peers(self) -> dict[PeerId, list[str]]:
        return {peer: ["/ip4/127.0.0.1/tcp/4001"] for peer in self.living}

    async def connect(self, peer: PeerId, _addresses: list[str], _timeout_s: float) -> None:
        self.asked.append(peer)
        if peer not in self.living:
            raise SwarmError("connection refused")

    def met_peers(self) -> list[PeerId]:
        return [peer for peer in OTHERS if peer in self.living]

    async def ping(self, peer: PeerId) -> DhtPing:
        if peer not in self.asked:
            self.asked.append(peer)
        return DhtPing(0.01, 0.0)

    async def explore(self) -> None:
        self.asked.clear()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Swarm, Membership]]:
    async def is_open(endpoint: HostPort) -> HostPort:
        return endpoint

    monkeypatch.setattr(membership, "_find_open", is_open)

    def join(is_client: bool) -> tuple[Swarm, Membership]:
        swarm = Swarm()
        kept = Membership(OWN, cast("Any", swarm), cast("Any", swarm), random.Random(0), is_client=is_client)
        run_virtual(kept.join([f"/ip4/127.0.0.1/tcp/4000/p2p/{BOOT}"], 5))
        swarm.asked.clear()
        return swarm, kept

    return join


@pytest.mark.parametrize(("is_client", "expected"), [(True, 2), (False, 16)])
def test_a_client_asks_its_bootstrap_peer_and_two_others_a_round(
    joined: Callable[[bool], tuple[Swarm, Membership]], is_client: bool, expected: int
) -> None:
    swarm, kept = joined(is_client)
    run_virtual(kept.keep_in_touch())
    assert len(swarm.asked) == 1 + expected
    assert BOOT in swarm.asked


def test_a_client_whose_few_are_gone_asks_the_others_before_it_counts_as_lost(
    joined: Callable[[bool], tuple[Swarm, Membership]], caplog: pytest.LogCaptureFixture
) -> None:
    swarm, kept = joined(True)
    run_virtual(kept.keep_in_touch())
    for survivor in OTHERS:
        swarm.living = {survivor}
        with caplog.at_level(logging.WARNING):
            run_virtual(kept.keep_in_touch())
    assert "all peers are lost" not in caplog.text
    swarm.living = ()
    run_virtual(kept.keep_in_touch())
    assert "all peers are lost" in caplog.text
