"""What announcements cost: a swarm in memory whose servers only announce and read, with every message counted.

The servers run the real `Announcer` and `Followers`, the client the real `Watcher`; only blocks and sessions are
missing. Lookups towards a key are not counted (everybody knows everybody in memory): in a Kademlia table each put
or get asks about as many peers again on its way there.
"""

import asyncio
import math
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corolla.client.config import ClientConfig
from corolla.client.router import view_period_s
from corolla.ids import Fingerprint, PeerId, short
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.followers import Followers
from corolla.swarm.announcement import Announcement
from corolla.swarm.view import ServerView, View
from corolla.swarm.watch import Watcher

MODEL = Fingerprint("f" * 32)
NUM_BLOCKS = 126
SETTLING_S = 400.0
"""Until what everybody published at the start, not knowing of the others, has expired."""
CLIENT_PERIOD_S = ClientConfig().refresh_period_s
_DEFAULTS = ServerConfig(model=Path("model"))
_EIGHT_RTTS = {f"neighbour{n}": 0.0123 for n in range(8)}


@dataclass(frozen=True, slots=True)
class Cost:
    """Per minute and peer, sent and received."""

    messages: float
    kilobytes: float


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Of one swarm that stood still for a while."""

    num_servers: int
    server_mean: Cost
    server_worst: Cost
    """The peer that happens to keep most records."""
    active_client: Cost
    idle_client: Cost
    num_seen: int
    """Servers in the client's view at the end."""
    most_under_a_key: int


@dataclass(frozen=True, slots=True)
class OperationPrices:
    """Of one round in which everybody announces itself, and one reading of everybody."""

    announcing: Cost
    """The mean of all servers: what each sends for itself, and gets as a keeper of others' records."""
    busiest: Cost
    reading: Cost
    num_seen: int
    most_under_a_key: int


async def measure_traffic(num_servers: int, *, minutes: float, seed: int = 0) -> TrafficReport:
    """Run such a swarm for its settling time and then count for `minutes`. For `run_virtual`."""
    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
    network = MemoryNetwork(rng, LinkConditions(latency_s=0.02))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(network.transport(f"server {n}")) for n in range(num_servers)]
        clients = [await stack.enter_async_context(network.transport(f"client {n}", is_client=True)) for n in range(2)]
        for peer in (*servers[1:], *clients):
            await peer.join(servers[0].addresses, timeout_s=5)
        watcher = Watcher(clients[0], MODEL)
        tasks = [task for server in servers for task in _serve(server, rng)]
        await asyncio.sleep(SETTLING_S)
        reading = asyncio.create_task(watcher.keep_fresh(view_period_s(num_servers, CLIENT_PERIOD_S)))
        before = {peer.peer: (peer.traffic.messages, peer.traffic.num_bytes) for peer in (*servers, *clients)}
        await asyncio.sleep(60 * minutes)
        costs = {peer.peer: _cost(before[peer.peer], peer, minutes) for peer in (*servers, *clients)}
        for task in (reading, *tasks):
            assert not task.done(), f"a task ended by itself: {task}"
            task.cancel()
        await asyncio.wait((reading, *tasks))
        return _report(servers, clients, costs, watcher)


async def price_operations(num_servers: int, seed: int = 0) -> OperationPrices:
    """What one announcement and one reading cost where so many are announced; for `run_virtual`.

    A whole life of a thousand servers takes minutes: this one has them announce themselves once, knowing of each other
    already, and one client read them all. How often each does so is said by their periods.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
    network = MemoryNetwork(rng, LinkConditions(latency_s=0.02))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(network.transport(f"server {n}")) for n in range(num_servers)]
        client = await stack.enter_async_context(network.transport("client", is_client=True))
        for transport in (*servers, client):
            transport.known.update(server.peer for server in servers if server is not transport)
        spans = {server.peer: _random_span(rng) for server in servers}
        everybody = View.of(
            ServerView(server.peer, _describe(server, spans[server.peer], _EIGHT_RTTS), 0.0) for server in servers
        )
        for server in servers:
            announcer = Announcer(
                server, partial(_describe, server, spans[server.peer], _EIGHT_RTTS),
                period_s=_DEFAULTS.announce_period_s, lifetime_s=_DEFAULTS.record_lifetime_s, view=lambda: everybody,
            )  # fmt: skip
            assert await announcer.announce()
        announced = {server.peer: _cost((0, 0), server, 1) for server in servers}
        watcher = Watcher(client, MODEL)
        await watcher.refresh()
        return OperationPrices(
            announcing=_mean(list(announced.values())),
            busiest=max(announced.values(), key=lambda cost: cost.messages),
            reading=_cost((0, 0), client, 1),
            num_seen=len(watcher.view.servers),
            most_under_a_key=max(server.records.most_under_a_key for server in servers),
        )


def _random_span(rng: random.Random) -> range:
    length = rng.randrange(8, 25)
    start = rng.randrange(NUM_BLOCKS - length + 1)
    return range(start, start + length)


def _describe(server: MemoryTransport, span: range, next_rtts: dict[str, float]) -> Announcement:
    return Announcement(
        state="online", start=span.start, end=span.stop, num_blocks=NUM_BLOCKS, fingerprint=MODEL,
        model_name="Model-405B-Instruct", dtype="bfloat16", decode_tokens_per_s=12.34,
        prefill_tokens_per_s=1234.5, free_cache_tokens=65536, queue_s=0.0123, max_session_tokens=8192,
        next_rtts=next_rtts, version="0.1.0", name=f"server {short(server.peer)}",
        addresses=[f"/ip4/192.168.100.100/tcp/31337/p2p/{server.peer}"], announced_at=server.wall_time(),
    )  # fmt: skip


def _serve(server: MemoryTransport, rng: random.Random) -> list[asyncio.Task[None]]:
    span = _random_span(rng)
    watcher = Watcher(server, MODEL)
    followers = Followers(server, watcher, lambda: span, rng=rng)
    announcer = Announcer(
        server,
        lambda: _describe(server, span, followers.next_rtts),
        period_s=_DEFAULTS.announce_period_s,
        lifetime_s=_DEFAULTS.record_lifetime_s,
        view=lambda: watcher.view,
        rng=rng,
    )
    return [asyncio.create_task(announcer.keep_announced()), asyncio.create_task(followers.keep_measured())]


def _cost(before: tuple[int, int], peer: MemoryTransport, minutes: float) -> Cost:
    messages, num_bytes = peer.traffic.messages - before[0], peer.traffic.num_bytes - before[1]
    return Cost(messages / minutes, num_bytes / 1000 / minutes)


def _mean(costs: list[Cost]) -> Cost:
    return Cost(
        math.fsum(cost.messages for cost in costs) / len(costs),
        math.fsum(cost.kilobytes for cost in costs) / len(costs),
    )


def _report(
    servers: list[MemoryTransport], clients: list[MemoryTransport], costs: dict[PeerId, Cost], watcher: Watcher
) -> TrafficReport:
    mine = [costs[server.peer] for server in servers]
    return TrafficReport(
        num_servers=len(servers),
        server_mean=_mean(mine),
        server_worst=Cost(max(cost.messages for cost in mine), max(cost.kilobytes for cost in mine)),
        active_client=costs[clients[0].peer],
        idle_client=costs[clients[1].peer],
        num_seen=len(watcher.view.servers),
        most_under_a_key=max(server.records.most_under_a_key for server in servers),
    )
