"""A reader asks few of those who keep the same, and all of them as soon as they may not."""

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.records import Shelf
from corolla.net.memory.transport import MemoryTransport
from corolla.net.readings import ASKED_FIRST, Readings
from corolla.net.records import REPLICAS

KEY = "corolla/1/test"
NEAR = range(20)
ALL = [PeerId(f"server {number}") for number in range(100)]


def has_read(peers: Sequence[PeerId] = ALL) -> Readings:
    readings = Readings(random.Random(0))
    readings.note(KEY, peers)
    return readings


def test_the_first_reading_asks_everybody_and_those_after_it_three_keepers_by_lot() -> None:
    readings = Readings(random.Random(0))
    assert readings.choose_first(KEY, NEAR, are_we_near=False) == list(NEAR)
    readings.note(KEY, ALL)
    drawn = [readings.choose_first(KEY, NEAR, are_we_near=False) for _ in range(100)]
    assert {len(set(asked)) for asked in drawn} == {ASKED_FIRST}
    assert {keeper for asked in drawn for keeper in asked} == set(range(REPLICAS))
    assert readings.choose_first("another key", NEAR, are_we_near=False) == list(NEAR)


def test_who_keeps_the_key_himself_does_not_ask_the_ninth_who_keeps_little_of_it() -> None:
    drawn = [has_read().choose_first(KEY, NEAR, are_we_near=True) for _ in range(100)]
    assert max(keeper for asked in drawn for keeper in asked) < REPLICAS - 1


def test_answers_that_agree_are_believed() -> None:
    assert not has_read().is_doubtful(KEY, [ALL, ALL, ALL])
    assert not has_read().is_doubtful(KEY, [ALL, ALL[3:], ALL[:-3]]), "some come and go between two answers"


def test_no_answer_and_nothing_are_no_reason_to_believe_the_rest() -> None:
    assert has_read().is_doubtful(KEY, [ALL, ALL, None])
    assert has_read([]).is_doubtful(KEY, [[], [], []])


def test_a_keeper_that_lacks_what_another_has_is_doubted() -> None:
    assert has_read([]).is_doubtful(KEY, [ALL, ALL[10:], ALL])
    assert has_read([]).is_doubtful(KEY, [ALL[:3], ALL[:2], ALL[:3]]), "of few records not one may be missing"
    assert has_read([]).is_doubtful(KEY, [[], [], ALL])
    assert has_read([]).is_doubtful(KEY, [ALL[:3]] * 3, ours=ALL[3:4])


def test_keepers_that_agree_to_leave_out_what_the_reader_has_seen_are_doubted() -> None:
    assert has_read().is_doubtful(KEY, [ALL[10:]] * 3)


def shelf(peer: MemoryTransport) -> Shelf:
    return peer.records._shelf  # pyright: ignore[reportPrivateUsage]


def with_keepers(
    scenario: Callable[[MemoryTransport, list[MemoryTransport]], Awaitable[None]], num_peers: int = 40
) -> None:
    """A reader in a swarm whose peers have all published under the key; and those who keep it, the nearest first."""

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(network.transport(f"server {n}")) for n in range(num_peers)]
            reader = await stack.enter_async_context(network.transport("reader", is_client=True))
            assert not await reader.records.get(KEY), "it knows nobody yet, so this is no first reading"
            for peer in (*peers[1:], reader):
                await peer.join(peers[0].addresses, timeout_s=5)
            for peer in peers:
                assert await peer.records.put(KEY, bytes(400), 600)
            assert len(await reader.records.get(KEY)) == num_peers
            assert reader.traffic.messages == 2 * 2 * len(NEAR), "a search, and all of them asked"
            await scenario(reader, [peer for peer in peers if len(shelf(peer).blobs(KEY)) > num_peers // 2])

    run_virtual(main())


def test_in_memory_a_reading_is_counted_as_three_copies() -> None:
    async def scenario(reader: MemoryTransport, keepers: list[MemoryTransport]) -> None:
        copy_bytes, before = shelf(keepers[0]).num_bytes(KEY), reader.traffic.num_bytes
        assert len(await reader.records.get(KEY)) == 40
        search_bytes = 40_000
        assert 3 * copy_bytes < reader.traffic.num_bytes - before < 3 * copy_bytes + search_bytes

    with_keepers(scenario)


def test_in_memory_keepers_that_lost_their_records_hide_none() -> None:
    async def scenario(reader: MemoryTransport, keepers: list[MemoryTransport]) -> None:
        for num_lost, keeper in enumerate(keepers[: REPLICAS - 1], start=1):
            keeper.records.forget_all()
            assert len(await reader.records.get(KEY)) == 40, f"{num_lost} of them"

    with_keepers(scenario)
