"""What it costs to be announced and to know who is there, for a model of 126 blocks.

    python benchmarks/announcing.py [--layouts]

The first table runs 10, 100 and 1,000 servers in memory on virtual time, with the real announcer and watcher and the
readings of placement, and counts messages and bytes per peer and minute (about a minute of real time for the last).
`--layouts` prints the second table alone: one announcement and one reading of everybody, by the choice of keys.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

from corolla.apps.sim.traffic import NUM_BLOCKS, Cost, measure_traffic
from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.swarm.announcement import NUM_KEYS

SIZES = (10, 100, 1000)
VALUE_BYTES = 420
"""Of an announcement with eight round trips and an address; the record around it has about 95 more."""

KeyNumbers = Callable[[PeerId, range], list[int]]


def by_peer(num_keys: int) -> KeyNumbers:
    return lambda peer, _span: [sum(peer.encode()) % num_keys]


def by_block(_peer: PeerId, span: range) -> list[int]:
    return list(span)


LAYOUTS: dict[str, tuple[KeyNumbers, int]] = {
    "one key": (by_peer(1), 1),
    f"{NUM_KEYS} keys by peer": (by_peer(NUM_KEYS), NUM_KEYS),
    "16 keys by peer": (by_peer(16), 16),
    "a key for each block": (by_block, NUM_BLOCKS),
}


async def cost_of_layout(num_servers: int, numbers: KeyNumbers, num_keys: int) -> tuple[Cost, Cost, int]:
    """(one announcement, one reading of all keys, records under the fullest key)."""
    rng = random.Random(0)  # noqa: S311 - reproducible on purpose
    network = MemoryNetwork(rng)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(network.transport(f"server {n}")) for n in range(num_servers)]
        reader = await stack.enter_async_context(network.transport("reader", is_client=True))
        for peer in (*servers[1:], reader):
            await peer.join(servers[0].addresses, timeout_s=5)
        for server in servers:  # what is read back after joining is not the price of an announcement
            await server.records.put(server.peer, b"first", 600)
        before = _sum_of(servers)
        for server in servers:
            start = rng.randrange(NUM_BLOCKS - 16)
            for number in numbers(server.peer, range(start, start + 16)):
                await server.records.put(f"key {number}", rng.randbytes(VALUE_BYTES), 600)
        sent = [after - before for before, after in zip(before, _sum_of(servers), strict=True)]
        announcing = Cost(sent[0] / 2 / num_servers, sent[1] / 2000 / num_servers)
        reading = Cost(0, 0)
        for _ in range(2):  # the first asks more
            messages, num_bytes = reader.traffic.messages, reader.traffic.num_bytes
            await asyncio.gather(*(reader.records.get(f"key {number}") for number in range(num_keys)))
            reading = Cost(reader.traffic.messages - messages, (reader.traffic.num_bytes - num_bytes) / 1000)
        return announcing, reading, max(server.records.most_under_a_key for server in servers)


def _sum_of(servers: list[MemoryTransport]) -> tuple[int, int]:
    traffic = [server.traffic for server in servers]
    return sum(each.messages for each in traffic), sum(each.num_bytes for each in traffic)


def print_layouts() -> None:
    print("\none announcement and one reading of everybody (messages / KB), spans of 16 of 126 blocks, 8 replicas")
    for name, (numbers, num_keys) in LAYOUTS.items():
        for num_servers in SIZES:
            announcing, reading, most = run_virtual(cost_of_layout(num_servers, numbers, num_keys))
            print(
                f"{name:22} {num_servers:5} servers   announce {announcing.messages:5.0f} / {announcing.kilobytes:6.1f}"
                f"   read {reading.messages:5.0f} / {reading.kilobytes:8.0f}   fullest key {most:4} of 500 records"
            )


def print_traffic() -> None:
    print("per peer and minute (messages / KB), sent and received")
    for num_servers in SIZES:
        found = run_virtual(measure_traffic(num_servers, minutes=10 if num_servers < 1000 else 5))
        told = {
            "server": found.server_mean,
            "busiest server": found.server_worst,
            "active client": found.active_client,
            "idle client": found.idle_client,
        }
        columns = "   ".join(f"{who} {cost.messages:.0f} / {cost.kilobytes:.0f}" for who, cost in told.items())
        print(f"{num_servers:5} servers, {found.num_seen} seen: {columns}", flush=True)


if __name__ == "__main__":
    if "--layouts" not in sys.argv[1:]:
        print_traffic()
    print_layouts()
