"""Callers of the hash table: known by their network, and held to a share of our time."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.libp2p.callers import ASK_PAUSE_S, FRESH_S, WORK, Callers, work_s
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.sealed import CallRefused
from corolla.net.memory.loop import run_virtual
from corolla.net.places import UNKNOWN

HERE, THERE = AddressGroup("192.0.2.0/24"), AddressGroup("198.51.100.0/24")
ALICE, MALLORY = PeerId("alice"), PeerId("mallory")


class Daemon:
    """Knows who is connected from where, and counts how often it is asked."""

    def __init__(self, groups: Mapping[PeerId, AddressGroup]) -> None:
        self.groups = dict(groups)
        self.times_asked = 0
        self.is_gone = False

    async def connected_groups(self) -> dict[PeerId, AddressGroup]:
        self.times_asked += 1
        if self.is_gone:
            raise SwarmError("the daemon is gone")
        return dict(self.groups)


def callers(daemon: Any) -> Callers:
    return Callers(daemon)


def find(*keys: bytes) -> Any:
    return hivemind().dht_pb2.FindRequest(keys=keys)


def store(count: int, size: int, subkey: bytes = b"\xa1x") -> Any:
    return hivemind().dht_pb2.StoreRequest(keys=[b"k"] * count, subkeys=[subkey] * count, values=[bytes(size)] * count)


def test_a_call_belongs_to_its_callers_network_and_nothing_else_does() -> None:
    async def scenario() -> None:
        known = callers(Daemon({ALICE: HERE}))

        async def handle(peer: PeerId) -> AddressGroup:
            await known.admit(peer, find())
            source = known.current()
            assert source is not None
            assert source.peer == peer
            return source.group

        groups = await asyncio.gather(*(asyncio.create_task(handle(peer)) for peer in (ALICE, MALLORY)))
        assert groups == [HERE, UNKNOWN]
        assert known.current() is None

    run_virtual(scenario())


def test_the_daemon_is_asked_seldom_however_many_strangers_call() -> None:
    async def scenario() -> None:
        daemon = Daemon({ALICE: HERE})
        known = callers(daemon)
        await known.admit(ALICE, find())
        for _ in range(100):
            await known.admit(ALICE, find())
        assert daemon.times_asked == 1
        started_at = asyncio.get_running_loop().time()
        for number in range(20):
            await known.admit(PeerId(f"stranger {number}"), find())
        assert daemon.times_asked == 21
        assert asyncio.get_running_loop().time() - started_at >= 19 * ASK_PAUSE_S
        daemon.groups[ALICE] = THERE
        await asyncio.sleep(FRESH_S + 1)
        await asyncio.create_task(known.admit(ALICE, find()))
        assert daemon.times_asked == 22

    run_virtual(scenario())


def test_without_a_daemon_callers_are_unknown_but_answered() -> None:
    async def scenario() -> None:
        daemon = Daemon({ALICE: HERE})
        daemon.is_gone = True
        known = callers(daemon)
        await known.admit(ALICE, find())
        source = known.current()
        assert source is not None
        assert source.group == UNKNOWN

    run_virtual(scenario())


def test_one_network_takes_a_share_of_our_time_and_others_theirs() -> None:
    async def scenario() -> None:
        known = callers(Daemon({ALICE: HERE, MALLORY: THERE}))
        flood = store(1000, 100)
        passed = 0
        for _ in range(100):
            try:
                await known.admit(MALLORY, flood)
                passed += 1
            except CallRefused:
                continue
        assert passed * work_s(flood) <= WORK.burst
        assert passed >= 5
        await known.admit(ALICE, flood)
        await asyncio.sleep(WORK.burst / WORK.per_s)
        await known.admit(MALLORY, flood)

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("request_", "least_s", "most_s"),
    [
        (find(), 0.0001, 0.001),
        (find(*[b"k"] * 1000), 0.1, 1),
        (store(1, 1000), 0.0001, 0.001),
        (store(1000, 1000), 0.1, 1),
        (store(1, 4 << 20, subkey=b""), 5, 20),
        (hivemind().dht_pb2.PingRequest(), 0.0001, 0.001),
    ],
)
def test_what_a_request_costs_follows_from_what_it_carries(request_: Any, least_s: float, most_s: float) -> None:
    assert least_s <= work_s(request_) <= most_s
