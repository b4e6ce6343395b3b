"""What announcements cost: a swarm in memory whose servers only announce and read, with every message counted.

The servers run the real `Announcer` and `Followers`, and read as `keep_placed` does where no move is worth it; only
blocks and sessions are missing. Each begins in the middle of its periods, and knows the others: so that a window of a
minute holds its share of readings that come every half hour, and each has read before, since the first reading asks
more (`net/readings.py`). What else a peer says is not in it: its pings of those
with whom it keeps in touch, and of servers that may follow.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from corolla.client.config import ClientConfig
from corolla.client.router import view_period_s
from corolla.ids import Fingerprint, short
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.server.announcer import Announcer
from corolla.server.config import ServerConfig
from corolla.server.followers import Followers, draw_period_s
from corolla.server.placing import PlacingConfig, longest_pause_s
from corolla.server.publisher import Lifetimes, read_living
from corolla.swarm.announcement import Announcement
from corolla.swarm.view import ServerView, View
from corolla.swarm.watch import Watcher

MODEL = Fingerprint("f" * 32)
NUM_BLOCKS = 126
SETTLING_S = 46.0
"""Until everybody has announced itself: then all read for the first time, and what is read counts from then on."""
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


async def measure_traffic(num_servers: int, *, minutes: float, seed: int = 0) -> TrafficReport:
    """Run such a swarm for its settling time and then count for `minutes`. For `run_virtual`."""
    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
    network = MemoryNetwork(rng, LinkConditions(latency_s=0.02))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(network.transport(f"server {n}")) for n in range(num_servers)]
        clients = [await stack.enter_async_context(network.transport(f"client {n}", is_client=True)) for n in range(2)]
        for peer in (*servers, *clients):  # joining one after the other, a thousand take half a minute
            peer.known.update(server.peer for server in servers if server is not peer)
        spans = [_random_span(rng) for _ in servers]
        everybody = View.of(
            ServerView(server.peer, _describe(server, span, _EIGHT_RTTS), 0.0)
            for server, span in zip(servers, spans, strict=True)
        )
        active, idle = clients
        watchers = [Watcher(peer, MODEL) for peer in (*servers, active)]
        tasks = [
            task
            for server, watcher, span in zip(servers, watchers[:-1], spans, strict=True)
            for task in _serve(server, watcher, span, everybody, rng)
        ]
        await asyncio.sleep(SETTLING_S)
        await asyncio.gather(*(watcher.refresh() for watcher in watchers))
        before = {peer.peer: (peer.traffic.messages, peer.traffic.num_bytes) for peer in (*servers, *clients)}
        await asyncio.sleep(60 * minutes)
        costs = [_cost(before[peer.peer], peer, minutes) for peer in servers]
        await watchers[-1].refresh()
        for task in tasks:
            assert not task.done(), f"a task ended by itself: {task}"
            task.cancel()
        await asyncio.wait(tasks)
        return TrafficReport(
            num_servers=num_servers,
            server_mean=_mean(costs),
            server_worst=Cost(max(cost.messages for cost in costs), max(cost.kilobytes for cost in costs)),
            active_client=_cost(before[active.peer], active, view_period_s(num_servers, CLIENT_PERIOD_S) / 60),
            idle_client=_cost(before[idle.peer], idle, minutes),
            num_seen=len(watchers[-1].view.servers),
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


def _serve(
    server: MemoryTransport, watcher: Watcher, span: range, everybody: View, rng: random.Random
) -> list[asyncio.Task[None]]:
    """What a server that has been there for long says and reads, from moments within its periods on."""
    num_servers = len(everybody.servers)
    followers = Followers(server, watcher, lambda: span, rng=rng)
    announcer = Announcer(
        server,
        lambda: _describe(server, span, followers.next_rtts or _EIGHT_RTTS),
        period_s=_DEFAULTS.announce_period_s,
        lifetime_s=_DEFAULTS.record_lifetime_s,
        view=lambda: watcher.view if watcher.view.servers else everybody,
        rng=rng,
    )
    longest_s = longest_pause_s(num_servers, PlacingConfig())

    async def keep_looking() -> None:
        while True:
            await read_living(server, watcher, Lifetimes())
            await asyncio.sleep(rng.uniform(0, longest_s))

    announcing_in_s = rng.uniform(0, _DEFAULTS.announce_period_s)
    measuring_in_s = SETTLING_S + rng.uniform(0, draw_period_s(num_servers, rng))
    looking_in_s = SETTLING_S + rng.triangular(0, longest_s, 0)  # what is left of a pause that was drawn evenly
    return [
        asyncio.create_task(_after(announcing_in_s, announcer.keep_announced)),
        asyncio.create_task(_after(measuring_in_s, lambda: followers.keep_measured(()))),
        asyncio.create_task(_after(looking_in_s, keep_looking)),
    ]


async def _after(pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(pause_s)
    await work()


def _cost(before: tuple[int, int], peer: MemoryTransport, minutes: float) -> Cost:
    messages, num_bytes = peer.traffic.messages - before[0], peer.traffic.num_bytes - before[1]
    return Cost(messages / minutes, num_bytes / 1000 / minutes)


def _mean(costs: list[Cost]) -> Cost:
    return Cost(
        math.fsum(cost.messages for cost in costs) / len(costs),
        math.fsum(cost.kilobytes for cost in costs) / len(costs),
    )
