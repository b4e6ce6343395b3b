"""The cheapest chain, and never a chain with a gap."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import pytest

from corolla.errors import MissingBlocks
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.cost import CostModel, between_s, block_s, entry_s, one_way_s
from corolla.swarm.route import Route, RouteHop, find_route
from corolla.swarm.view import ServerView, View

NO_COMPUTE = 1e12
EXACT = CostModel(near_tie=0.0)


def server(
    name: str,
    start: int,
    end: int,
    rtt_s: float | None = 0.02,
    *,
    free_cache_tokens: int = 1000,
    max_session_tokens: int = 0,
    decode_tokens_per_s: float = NO_COMPUTE,
    queue_s: float = 0.0,
    state: Literal["joining", "online", "draining"] = "online",
    next_rtts: dict[PeerId, float] | None = None,
    num_blocks: int = 4,
) -> ServerView:
    said = Announcement(
        state=state,
        start=start,
        end=end,
        num_blocks=num_blocks,
        fingerprint=Fingerprint("0" * 32),
        model_name="model",
        dtype="float32",
        decode_tokens_per_s=decode_tokens_per_s,
        free_cache_tokens=free_cache_tokens,
        max_session_tokens=max_session_tokens,
        queue_s=queue_s,
        next_rtts=next_rtts or {},
    )
    return ServerView(PeerId(name), said, expires_at=0.0, rtt_s=rtt_s)


def route(
    servers: list[ServerView], blocks: int | range, *, tokens_needed: int = 100, cost: CostModel = EXACT
) -> Route:
    return find_route(View.of(servers), blocks, cost, tokens_needed=tokens_needed, rng=random.Random(0))


def hops(found: Route) -> list[tuple[str, int, int]]:
    return [(hop.peer, hop.start, hop.end) for hop in found.hops]


# The four cases with the predecessor's constants: 0.018 s per server, 10 s when the cache is full, no compute.


def test_a_full_cache_sends_the_session_to_the_farther_server() -> None:
    found = route([server("A", 0, 4, 0.02, free_cache_tokens=99), server("B", 0, 4, 0.20)], 4)
    assert hops(found) == [("B", 0, 4)]
    assert found.cost_s == pytest.approx(0.218, abs=1e-9)


def test_with_room_the_nearer_server_is_taken() -> None:
    found = route([server("A", 0, 4, 0.02), server("B", 0, 4, 0.20)], 4)
    assert hops(found) == [("A", 0, 4)]
    assert found.cost_s == pytest.approx(0.038, abs=1e-9)


def test_two_halves_are_chained_in_order() -> None:
    found = route([server("B", 2, 4, 0.02), server("A", 0, 2, 0.02)], 4)
    assert hops(found) == [("A", 0, 2), ("B", 2, 4)]


def test_missing_blocks_are_named_before_anything_is_searched() -> None:
    with pytest.raises(MissingBlocks) as missing:
        route([server("A", 0, 2), server("B", 2, 4)], 6)
    assert missing.value.blocks == [4, 5]


# What else a route weighs.


def test_a_server_is_entered_in_the_middle_but_left_only_at_its_end() -> None:
    """C could take over at block 1 already; the route stays with A until A's span ends."""
    found = route([server("A", 0, 3, 0.02), server("C", 1, 4, 0.02)], 4)
    assert hops(found) == [("A", 0, 3), ("C", 3, 4)]


def test_a_part_of_the_model_can_be_routed_alone() -> None:
    found = route([server("A", 0, 3), server("B", 2, 4)], range(1, 3))
    assert hops(found) == [("A", 1, 3)]


def test_one_far_server_can_cost_more_than_two_near_ones() -> None:
    near = [server("A", 0, 2, 0.02), server("B", 2, 4, 0.02)]
    assert hops(route([*near, server("far", 0, 4, 0.5)], 4)) == [("A", 0, 2), ("B", 2, 4)]
    assert hops(route([*near, server("nearby", 0, 4, 0.03)], 4)) == [("nearby", 0, 4)]


def test_the_announced_delay_between_servers_counts() -> None:
    a = server("A", 0, 2, 0.2, next_rtts={PeerId("B"): 0.5, PeerId("C"): 0.001})
    found = route([a, server("B", 2, 4, 0.2), server("C", 2, 4, 0.2)], 4)
    assert hops(found) == [("A", 0, 2), ("C", 2, 4)]
    assert found.cost_s == pytest.approx(0.1 + 0.018 + 0.0005 + 0.018 + 0.1)


def test_an_unannounced_delay_between_servers_is_the_way_through_the_client() -> None:
    found = route([server("A", 0, 2, 0.02), server("B", 2, 4, 0.06)], 4)
    assert found.cost_s == pytest.approx(0.01 + 0.018 + (0.01 + 0.03) + 0.018 + 0.03)


def test_an_unknown_round_trip_has_a_default_and_zero_is_known() -> None:
    assert one_way_s(EXACT, None) == pytest.approx(0.15)
    assert one_way_s(EXACT, 0.0) == 0.0
    assert hops(route([server("unknown", 0, 4, None), server("here", 0, 4, 0.0)], 4)) == [("here", 0, 4)]


def test_slow_beats_no_route() -> None:
    assert route([server("A", 0, 4, 1e6)], 4).cost_s == pytest.approx(2 * 5.0 + 0.018)
    assert route([server("A", 0, 4, free_cache_tokens=0)], 4).cost_s > 10


def test_compute_and_queue_are_weighed_against_delay() -> None:
    slow = server("slow", 0, 4, 0.02, decode_tokens_per_s=2.0)
    fast = server("fast", 0, 4, 0.20, decode_tokens_per_s=100.0)
    busy = server("busy", 0, 4, 0.02, decode_tokens_per_s=100.0, queue_s=1.0)
    assert hops(route([slow, fast, busy], 4)) == [("fast", 0, 4)]
    assert route([slow], 4).cost_s == pytest.approx(0.038 + 0.5)
    assert route([slow], range(2, 4)).cost_s == pytest.approx(0.038 + 0.25)


def test_a_server_with_a_shorter_longest_session_comes_last() -> None:
    short = server("short", 0, 4, 0.01, max_session_tokens=50)
    assert hops(route([short, server("long", 0, 4, 0.2)], 4, tokens_needed=51)) == [("long", 0, 4)]
    assert hops(route([short, server("long", 0, 4, 0.2)], 4, tokens_needed=50)) == [("short", 0, 4)]


def test_a_draining_server_is_the_last_resort_and_a_joining_one_none() -> None:
    draining = server("draining", 0, 4, 0.001, state="draining")
    full = server("full", 0, 4, free_cache_tokens=0)
    assert hops(route([draining, full], 4)) == [("full", 0, 4)]
    assert hops(route([draining], 4)) == [("draining", 0, 4)]
    with pytest.raises(MissingBlocks):
        route([server("joining", 0, 4, state="joining")], 4)


def test_near_ties_are_broken_at_random_and_nothing_else_is() -> None:
    servers = [server("A", 0, 4, 0.100), server("B", 0, 4, 0.104), server("C", 0, 4, 0.120)]
    rng = random.Random(1)
    taken = Counter(
        find_route(View.of(servers), 4, CostModel(), tokens_needed=1, rng=rng).hops[0].peer for _ in range(1000)
    )
    assert set(taken) == {"A", "B"}
    assert min(taken.values()) > 400


def test_near_ties_in_the_middle_of_a_chain_are_broken_too() -> None:
    spans = {"A": (0, 2), "B1": (2, 4), "B2": (2, 4), "C": (4, 6)}
    view = View.of([server(name, start, end, num_blocks=6) for name, (start, end) in spans.items()])
    rng = random.Random(1)
    taken = Counter(find_route(view, 6, CostModel(), tokens_needed=1, rng=rng).hops[1].peer for _ in range(200))
    assert set(taken) == {"B1", "B2"}
    assert min(taken.values()) > 60


# Against exhaustive search.


def random_swarm(rng: random.Random) -> tuple[list[ServerView], int]:
    """Up to seven servers of every kind over a few blocks; rarely a gap, often ties."""
    num_blocks = rng.randrange(1, 9)
    names = [f"peer{number}" for number in range(rng.randrange(1, 8))]
    servers: list[ServerView] = []
    for name in names:
        start = rng.randrange(num_blocks)
        servers.append(
            server(
                name,
                start,
                rng.randrange(start + 1, num_blocks + 1),
                rng.choice([None, 0.0, 0.01, rng.random() / 5, 100.0]),
                free_cache_tokens=rng.choice([10, 1000, 1000]),
                decode_tokens_per_s=rng.choice([0.0, 5.0, 200.0 * rng.random() + 1]),
                queue_s=rng.choice([0.0, rng.random() / 10]),
                state=rng.choice(["online", "online", "online", "draining", "joining"]),
                next_rtts={PeerId(other): rng.random() / 5 for other in names if rng.random() < 0.3},
                num_blocks=num_blocks,
            )
        )
    return servers, num_blocks


def all_routes(servers: list[ServerView], num_blocks: int) -> Iterator[list[tuple[ServerView, int, int]]]:
    """Every chain that leaves servers only where their spans end."""

    def extend(so_far: list[tuple[ServerView, int, int]], position: int) -> Iterator[list[tuple[ServerView, int, int]]]:
        if position == num_blocks:
            yield so_far
            return
        for following in servers:
            if following.is_usable and following.start <= position < following.end:
                yield from extend([*so_far, (following, position, following.end)], following.end)

    yield from extend([], 0)


def cost_of(chain: list[tuple[ServerView, int, int]], cost: CostModel, tokens_needed: int) -> float:
    seconds = one_way_s(cost, chain[0][0].rtt_s) + one_way_s(cost, chain[-1][0].rtt_s)
    seconds += sum(between_s(cost, a[0], b[0]) for a, b in itertools.pairwise(chain))
    seconds += sum(entry_s(cost, hop, tokens_needed) + (end - start) * block_s(cost, hop) for hop, start, end in chain)
    return seconds


def test_the_route_is_as_cheap_as_the_best_of_all_chains() -> None:
    rng = random.Random(2)
    num_routed = 0
    for _ in range(400):
        servers, num_blocks = random_swarm(rng)
        costs = {
            tuple(RouteHop(hop.peer, start, end) for hop, start, end in chain): cost_of(chain, EXACT, 100)
            for chain in all_routes(servers, num_blocks)
        }
        if not costs:
            with pytest.raises(MissingBlocks):
                route(servers, num_blocks)
            continue
        num_routed += 1
        best = route(servers, num_blocks)
        assert best.cost_s == pytest.approx(min(costs.values()))
        near = find_route(View.of(servers), num_blocks, CostModel(), tokens_needed=100, rng=rng)
        assert near.cost_s == pytest.approx(costs[near.hops])
        assert near.cost_s <= 1.05 * min(costs.values()) + 1e-9
    assert num_routed > 150


def test_twenty_servers_of_a_deep_model_take_milliseconds() -> None:
    rng = random.Random(3)
    servers = [
        server(f"peer{number}", start := 4 * number, min(start + 20, 80), rng.random() / 10, num_blocks=80)
        for number in range(20)
    ]
    view = View.of(servers)
    durations_s: list[float] = []
    for _ in range(20):
        started_at = time.perf_counter()
        find_route(view, 80, CostModel(), tokens_needed=100, rng=rng)
        durations_s.append(time.perf_counter() - started_at)
    assert min(durations_s) < 0.005


@pytest.mark.parametrize("bad", [{"near_tie": -0.1}, {"no_room_s": float("nan")}, {"unknown_tokens_per_s": 0.0}])
def test_constants_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        CostModel(**bad)
