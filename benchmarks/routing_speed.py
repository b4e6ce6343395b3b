"""How long `find_route` takes: 20 servers × 80 blocks, and 1,000 servers × 126 blocks, with eight measured delays
each, and with eight measured capacities each and failed links besides.

    python benchmarks/routing_speed.py

Prints the median and the 95th percentile of many searches over random swarms, in CPU time; `docs/routing.md` quotes
them.
"""

import platform
import random
import statistics
import time
from dataclasses import replace

import msgspec

from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import MAX_INFLOWS, MAX_NEXT_RTTS, Announcement
from corolla.swarm.cost import CostModel
from corolla.swarm.route import find_route, find_routes
from corolla.swarm.view import ServerView, View

COST = CostModel()


NUM_FAILED_LINKS = 100
"""That the client was told of in the last minutes."""


def random_view(
    num_servers: int, num_blocks: int, span: range, rng: random.Random, *, with_capacities: bool = False
) -> View:
    """Spans of random length: half of them end to end, again and again, half anywhere; eight round trips announced.

    With capacities: those of eight links to each server too, and some links that failed.
    """
    spans: dict[PeerId, tuple[int, int]] = {}
    reached = 0
    for number in range(num_servers):
        start = reached if number % 2 == 0 else rng.randrange(num_blocks)
        end = min(start + rng.choice(span), num_blocks)
        spans[PeerId(f"peer{number}")] = start, end
        if number % 2 == 0:
            reached = end % num_blocks
    view = View.of(_server(peer, spans, num_blocks, rng) for peer in spans)
    return _with_capacities(view, spans, rng) if with_capacities else view


def _server(peer: PeerId, spans: dict[PeerId, tuple[int, int]], num_blocks: int, rng: random.Random) -> ServerView:
    start, end = spans[peer]
    following = [other for other, (first, last) in spans.items() if first <= end < last]
    said = Announcement(
        state="online", start=start, end=end, num_blocks=num_blocks, fingerprint=Fingerprint("0" * 32),
        model_name="model", dtype="bfloat16", decode_tokens_per_s=rng.uniform(5, 200), free_cache_tokens=10_000,
        queue_s=rng.choice([0.0, rng.random() / 10]),
        next_rtts={near: rng.random() / 5 for near in rng.sample(following, min(MAX_NEXT_RTTS, len(following)))},
    )  # fmt: skip
    return ServerView(peer, said, expires_at=0.0, rtt_s=rng.choice([None, rng.random() / 5, rng.random() / 5]))


def _with_capacities(view: View, spans: dict[PeerId, tuple[int, int]], rng: random.Random) -> View:
    links: list[tuple[PeerId, PeerId]] = []
    servers: list[ServerView] = []
    for server in view.servers.values():
        before = [other for other, (_, end) in spans.items() if server.start <= end < server.end]
        seen = rng.sample(before, min(MAX_INFLOWS, len(before)))
        links += [(other, server.peer) for other in before]
        inflows = {other: int(10 ** rng.uniform(6, 8)) for other in seen}
        servers.append(replace(server, announcement=msgspec.structs.replace(server.announcement, inflows=inflows)))
    failed = rng.sample(links, min(NUM_FAILED_LINKS, len(links)))
    return replace(View.of(servers), link_penalties_s={link: rng.random() for link in failed})


def measure(
    num_servers: int, num_blocks: int, span: range, *, with_capacities: bool, repeats: int, seed: int = 1
) -> tuple[float, float]:
    """(median, 95th percentile) seconds of one search."""
    rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
    views = [random_view(num_servers, num_blocks, span, rng, with_capacities=with_capacities) for _ in range(10)]
    durations_s: list[float] = []
    for number in range(repeats):
        view = views[number % len(views)]
        started_at = time.process_time()
        find_route(view, num_blocks, COST, tokens_needed=1000, rng=rng)
        durations_s.append(time.process_time() - started_at)
    return statistics.median(durations_s), sorted(durations_s)[int(0.95 * len(durations_s))]


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for num_servers, num_blocks, span in (
        (20, 80, range(8, 24)),
        (1000, 126, range(4, 24)),
        (1000, 126, range(40, 80)),
    ):
        for with_capacities in (False, True):
            median_s, slow_s = measure(num_servers, num_blocks, span, with_capacities=with_capacities, repeats=100)
            print(
                f"{num_servers} servers × {num_blocks} blocks, spans of {span.start} to {span.stop - 1}, "
                f"{'delays, capacities and failed links' if with_capacities else 'delays'}: "
                f"median {1000 * median_s:.2f} ms, p95 {1000 * slow_s:.2f} ms"
            )
    rng = random.Random(2)  # noqa: S311 - reproducible on purpose
    view = random_view(1000, 126, range(4, 24), rng)
    started_at = time.process_time()
    found = find_routes(view, 126, COST, tokens_needed=1000, count=5)
    print(f"the {len(found)} best of 1000 × 126: {1000 * (time.process_time() - started_at):.1f} ms")


if __name__ == "__main__":
    main()
