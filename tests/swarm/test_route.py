"""The cheapest chain, and never a chain with a gap."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec
import pytest

from corolla.errors import MissingBlocks
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import UNREACHABLE_RTT_S, Announcement
from corolla.swarm.chain import price_route
from corolla.swarm.cost import CostModel, between_s, block_s, entry_s, one_way_s
from corolla.swarm.peers import LINK_PENALTY_S
from corolla.swarm.route import Mode, Route, RouteHop, find_route, find_routes, leave_probability
from corolla.swarm.view import ServerView, View

MODES: tuple[Mode, ...] = get_args(Mode)
NO_COMPUTE = 1e12
EXACT = CostModel(hop_overhead_s=0.018, near_tie=0.0)
"""The predecessor's constants, and always the very best."""


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
    next_rtts: dict[str, float] | None = None,
    inflows: dict[str, int] | None = None,
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
        inflows=inflows or {},
    )
    return ServerView(PeerId(name), said, expires_at=0.0, rtt_s=rtt_s)


def replaced(known: ServerView, **fields: Any) -> ServerView:
    """The same server announcing something else."""
    return replace(known, announcement=msgspec.structs.replace(known.announcement, **fields))


def with_inflows(known: ServerView, inflows: dict[str, int]) -> ServerView:
    return replaced(known, inflows=inflows)


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
    a = server("A", 0, 2, 0.2, next_rtts={"B": 0.5, "C": 0.001})
    found = route([a, server("B", 2, 4, 0.2), server("C", 2, 4, 0.2)], 4)
    assert hops(found) == [("A", 0, 2), ("C", 2, 4)]
    assert found.cost_s == pytest.approx(0.1 + 0.018 + 0.0005 + 0.018 + 0.1)


def test_a_slow_link_of_its_own_keeps_the_server_that_is_done_first_from_standing_for_the_others() -> None:
    first, second = server("first", 0, 2, 0.2, next_rtts={"last": 4.0}), server("second", 0, 2, 0.04, queue_s=0.1)
    found = route([first, second, server("last", 2, 4, None)], 4)
    assert hops(found) == [("second", 0, 2), ("last", 2, 4)]
    assert found.cost_s == pytest.approx(0.02 + 0.1 + 0.018 + 0.15 + 0.018 + 0.15)


def test_a_thin_link_costs_what_the_activations_take_on_it() -> None:
    a, wide = server("A", 0, 2, 0.02), server("wide", 2, 4, 0.03, inflows={"A": 100_000_000})
    thin = server("thin", 2, 4, 0.02, inflows={"A": 500_000, "someone else": 1})
    found = route([a, wide, thin], 4)
    assert hops(found) == [("A", 0, 2), ("wide", 2, 4)]
    price = price_route(View.of([a, thin]), route([a, thin], 4).hops, EXACT, tokens_needed=100)
    assert price is not None
    assert [hop.transfer_s for hop in price.hops] == [0.0, pytest.approx(EXACT.activation_bytes / 500_000)]
    assert hops(route([a, wide, thin], 4, cost=replace(EXACT, activation_bytes=100))) == [("A", 0, 2), ("thin", 2, 4)]


def test_a_thin_link_costs_by_what_one_position_of_this_model_takes() -> None:
    a = server("A", 0, 2, 0.02)
    known = server("wide", 2, 4, 0.03, inflows={"A": 100_000_000}), server("thin", 2, 4, 0.02, inflows={"A": 1_000_000})
    large, small = ([replaced(server, position_bytes=size) for server in known] for size in (65_536, 2_048))
    assert hops(route([a, *large], 4)) == [("A", 0, 2), ("wide", 2, 4)]
    assert hops(route([a, *small], 4)) == [("A", 0, 2), ("thin", 2, 4)]
    servers = [a, large[1]]
    price = price_route(View.of(servers), route(servers, 4).hops, EXACT, tokens_needed=100)
    assert price is not None
    assert price.hops[1].transfer_s == pytest.approx(0.065536)


def test_a_thin_link_is_taken_to_decode_and_avoided_for_a_long_prompt() -> None:
    """32 ms a step are less than the detour; 2,000 positions are 65 s, a quarter of a second for each of 256 steps."""
    a, wide = server("A", 0, 2, 0.02), server("wide", 2, 4, 0.16, inflows={"A": 100_000_000})
    thin = server("thin", 2, 4, 0.02, inflows={"A": 500_000})
    decode = EXACT.for_session(prompt_tokens=1, max_tokens=4096)
    long = EXACT.for_session(prompt_tokens=2000, max_tokens=4096)
    assert decode.positions_per_step == EXACT.positions_per_step
    assert hops(route([a, wide, thin], 4, cost=decode)) == [("A", 0, 2), ("thin", 2, 4)]
    assert hops(route([a, wide, thin], 4, cost=long)) == [("A", 0, 2), ("wide", 2, 4)]
    price = price_route(View.of([a, thin]), route([a, thin], 4).hops, long, tokens_needed=100)
    assert price is not None
    assert 256 * price.hops[1].transfer_s == pytest.approx((2000 + 255) * EXACT.activation_bytes / 500_000)


def test_the_fewer_steps_follow_a_prompt_the_more_its_bytes_weigh() -> None:
    def per_step(prompt_tokens: int, max_tokens: int, rows: int = 1) -> float:
        return CostModel().for_session(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, rows=rows
        ).positions_per_step  # fmt: skip

    assert per_step(2000, 2000) == 2000  # one step: nothing follows
    assert per_step(2000, 2099) == pytest.approx((2000 + 99) / 100)
    assert per_step(2000, 2255) == per_step(2000, 100_000) == pytest.approx((2000 + 255) / 256)
    assert per_step(1, 1) == per_step(1, 100_000) == 1
    assert per_step(10, 19, rows=3) == pytest.approx(3 * 1.9)


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


def test_the_rows_of_a_batch_make_no_session_too_long() -> None:
    cost = EXACT.for_session(prompt_tokens=10, max_tokens=50, rows=8)
    servers = [server("near", 0, 4, 0.01, max_session_tokens=50), server("far", 0, 4, 0.2)]
    assert hops(route(servers, 4, tokens_needed=400, cost=cost)) == [("near", 0, 4)]


def test_a_draining_server_is_the_last_resort_and_a_joining_one_none() -> None:
    draining = server("draining", 0, 4, 0.001, state="draining")
    full = server("full", 0, 4, free_cache_tokens=0)
    assert hops(route([draining, full], 4)) == [("full", 0, 4)]
    assert hops(route([draining], 4)) == [("draining", 0, 4)]
    with pytest.raises(MissingBlocks):
        route([server("joining", 0, 4, state="joining")], 4)


def test_near_ties_are_broken_at_random_and_nothing_else_is() -> None:
    servers = [server("A", 0, 4, 0.100), server("B", 0, 4, 0.104), server("C", 0, 4, 0.107)]
    rng = random.Random(1)
    taken = Counter(
        find_route(View.of(servers), 4, CostModel(), tokens_needed=1, rng=rng).hops[0].peer for _ in range(1000)
    )
    assert set(taken) == {"A", "B"}
    assert min(taken.values()) > 400


def test_near_ties_are_broken_at_random_without_a_word_on_chance_and_never_alike_for_all() -> None:
    view = View.of([server("A", 0, 4), server("B", 0, 4)])
    seeded_alike: list[list[PeerId]] = []
    for _ in range(2):
        random.seed(1)
        taken = [
            find_route(view, range(4), CostModel(), tokens_needed=1, mode=mode).hops[0].peer for mode in MODES * 64
        ]
        seeded_alike.append(taken)
    assert seeded_alike[0] != seeded_alike[1]
    assert set(seeded_alike[0][::2]) == set(seeded_alike[0][1::2]) == {"A", "B"}


def test_near_ties_in_the_middle_of_a_chain_are_broken_too() -> None:
    spans = {"A": (0, 2), "B1": (2, 4), "B2": (2, 4), "C": (4, 6)}
    view = View.of([server(name, start, end, num_blocks=6) for name, (start, end) in spans.items()])
    rng = random.Random(1)
    taken = Counter(find_route(view, 6, CostModel(), tokens_needed=1, rng=rng).hops[1].peer for _ in range(200))
    assert set(taken) == {"B1", "B2"}
    assert min(taken.values()) > 60


# Against exhaustive search.


def random_swarm(rng: random.Random) -> tuple[View, int]:
    """Up to seven servers of every kind over a few blocks; rarely a gap, often ties."""
    num_blocks = rng.randrange(1, 9)
    names = [PeerId(f"peer{number}") for number in range(rng.randrange(1, 8))]
    servers: list[ServerView] = []
    for name in names:
        start = rng.randrange(num_blocks)
        announced = server(
            name,
            start,
            rng.randrange(start + 1, num_blocks + 1),
            rng.choice([None, 0.0, 0.01, rng.random() / 5, 100.0]),
            free_cache_tokens=rng.choice([10, 1000, 1000]),
            decode_tokens_per_s=rng.choice([0.0, 5.0, 200.0 * rng.random() + 1]),
            queue_s=rng.choice([0.0, rng.random() / 10]),
            state=rng.choice(["online", "online", "online", "draining", "joining"]),
            next_rtts={str(other): rng.random() / 5 for other in names if rng.random() < 0.3},
            inflows={str(other): rng.choice([1, 100_000, 1 << 40]) for other in names if rng.random() < 0.2},
            num_blocks=num_blocks,
        )
        servers.append(replace(announced, queue_s=rng.choice([None, 0.05]), block_s=rng.choice([None, 0.001, 0.1])))
    penalties_s = {(a, b): rng.random() for a in names for b in names if rng.random() < 0.1}
    return replace(View.of(servers), link_penalties_s=penalties_s), num_blocks


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


def cost_of(view: View, chain: list[tuple[ServerView, int, int]], cost: CostModel, tokens_needed: int) -> float:
    seconds = one_way_s(cost, chain[0][0].rtt_s) + one_way_s(cost, chain[-1][0].rtt_s)
    seconds += sum(between_s(cost, view, a[0], b[0]) for a, b in itertools.pairwise(chain))
    seconds += sum(entry_s(cost, hop, tokens_needed) + (end - start) * block_s(cost, hop) for hop, start, end in chain)
    return seconds


def all_costs(view: View, num_blocks: int, cost: CostModel = EXACT) -> dict[tuple[RouteHop, ...], float]:
    return {
        tuple(RouteHop(hop.peer, start, end) for hop, start, end in chain): cost_of(view, chain, cost, 100)
        for chain in all_routes(list(view.servers.values()), num_blocks)
    }


def test_the_route_is_as_cheap_as_the_best_of_all_chains_in_a_thousand_swarms_that_have_one() -> None:
    rng = random.Random(2)
    num_routed = num_chosen = num_missing = 0
    while num_routed < 1000:
        view, num_blocks = random_swarm(rng)
        costs = all_costs(view, num_blocks)
        if not costs:
            with pytest.raises(MissingBlocks) as missing:
                find_route(view, num_blocks, EXACT, tokens_needed=100, rng=rng)
            assert missing.value.blocks == view.missing_blocks
            num_missing += 1
            continue
        num_routed += 1
        num_chosen += len(costs) > 1
        best = find_route(view, num_blocks, EXACT, tokens_needed=100, rng=rng)
        assert best.cost_s == pytest.approx(min(costs.values()))
        near = find_route(view, num_blocks, replace(EXACT, near_tie=0.05), tokens_needed=100, rng=rng)
        assert near.cost_s == pytest.approx(costs[near.hops])
        assert near.cost_s <= 1.05 * min(costs.values()) + 1e-6
    assert num_chosen > 600
    assert num_missing > 600


def test_the_route_of_a_long_prompt_is_as_cheap_as_the_best_of_all_chains_too() -> None:
    rng, long = random.Random(7), EXACT.for_session(prompt_tokens=2000, max_tokens=2100)
    num_changed = 0
    for _ in range(1000):
        view, num_blocks = random_swarm(rng)
        names = list(view.servers)
        links = ({str(other): int(10 ** rng.uniform(5, 8)) for other in names if rng.random() < 0.7} for _ in names)
        view = replace(View.of(map(with_inflows, view.servers.values(), links)), link_penalties_s=view.link_penalties_s)
        costs = all_costs(view, num_blocks, long)
        if not costs:
            continue
        best = find_route(view, num_blocks, long, tokens_needed=100, rng=rng)
        assert best.cost_s == pytest.approx(min(costs.values()))
        decode = find_route(view, num_blocks, EXACT, tokens_needed=100, rng=rng)
        num_changed += costs[decode.hops] > best.cost_s + 1e-6
    assert num_changed > 5


def test_the_best_chains_come_in_order_and_none_is_forgotten() -> None:
    rng = random.Random(4)
    num_compared = 0
    for _ in range(300):
        view, num_blocks = random_swarm(rng)
        costs = all_costs(view, num_blocks)
        if not costs:
            continue
        found = find_routes(view, num_blocks, EXACT, tokens_needed=100, count=6)
        assert [route.cost_s for route in found] == pytest.approx(sorted(costs.values())[:6])
        assert all(route.cost_s == pytest.approx(costs[route.hops]) for route in found)
        assert len({route.hops for route in found}) == min(6, len(costs))
        num_compared += len(costs) > 6
    assert num_compared > 10


def test_the_terms_of_a_route_sum_up_to_its_cost() -> None:
    rng = random.Random(5)
    num_priced = 0
    for _ in range(200):
        view, num_blocks = random_swarm(rng)
        for hops, cost_s in all_costs(view, num_blocks).items():
            price = price_route(view, hops, EXACT, tokens_needed=100)
            assert price is not None
            assert price.total_s == pytest.approx(cost_s)
            num_priced += 1
    assert num_priced > 200


def test_a_route_without_given_servers_goes_round_them_or_names_what_they_leave_open() -> None:
    view = View.of([server("near", 0, 4, 0.01), server("far", 0, 4, 0.1), server("half", 0, 2, 0.01)])
    names = [PeerId("near")]
    assert find_route(view.without(names), 4, EXACT, tokens_needed=1, rng=random.Random(0)).hops[0].peer == "far"
    with pytest.raises(MissingBlocks) as missing:
        find_route(view.only([PeerId("half")]), 4, EXACT, tokens_needed=1, rng=random.Random(0))
    assert missing.value.blocks == [2, 3]


# What this client knows better than the announcements.


def test_measured_waits_and_compute_times_count_instead_of_announced_ones() -> None:
    idle, busy = server("idle", 0, 4, queue_s=0.5), server("busy", 0, 4)
    assert hops(route([idle, busy], 4)) == [("busy", 0, 4)]
    assert hops(route([replace(idle, queue_s=0.0), replace(busy, queue_s=0.2)], 4)) == [("idle", 0, 4)]
    assert hops(route([idle, replace(busy, block_s=1.0)], 4)) == [("idle", 0, 4)]


def test_a_penalty_costs_the_link_and_neither_of_its_ends() -> None:
    servers = [server("A1", 0, 2), server("A2", 0, 2, 0.021), server("B1", 2, 4), server("B2", 2, 4, 0.021)]
    view = replace(View.of(servers), link_penalties_s={(PeerId("A1"), PeerId("B1")): 1.0})
    best = find_routes(view, 4, EXACT, tokens_needed=1, count=4)
    assert {(route.hops[0].peer, route.hops[1].peer) for route in best[:2]} == {("A1", "B2"), ("A2", "B1")}
    assert (best[3].hops[0].peer, best[3].hops[1].peer) == ("A1", "B1")


# Staying and leaving.


def test_a_route_in_use_is_kept_until_another_is_clearly_better() -> None:
    used, other = server("used", 0, 4, 0.100), server("other", 0, 4, 0.095)
    current = Route((RouteHop(PeerId("used"), 0, 4),), cost_s=9.9)

    def again(*servers: ServerView) -> Route:
        return find_route(View.of(servers), 4, CostModel(), tokens_needed=1, rng=random.Random(0), current=current)

    assert hops(again(used, other)) == [("used", 0, 4)]
    assert again(used, other).cost_s == pytest.approx(0.101)
    assert hops(again(used, replace(other, rtt_s=0.01))) == [("other", 0, 4)]
    assert hops(again(other)) == [("other", 0, 4)]
    moved = server("used", 1, 4, 0.1)
    assert hops(again(moved, other)) == [("other", 0, 4)]


@pytest.mark.parametrize(
    ("now_s", "best_s", "load_s", "share"),
    [(1.0, 0.95, 0.9, 0.0), (1.4, 0.6, 1.4, 2 / 7), (1.0, 0.5, 0.1, 1.0), (1.0, 0.5, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)],
)
def test_of_a_crowd_only_the_share_leaves_that_evens_things_out(
    now_s: float, best_s: float, load_s: float, share: float
) -> None:
    assert leave_probability(now_s, best_s, load_s, CostModel()) == pytest.approx(share)


STEP_S = 0.02


def share_after_one_round(seed: int) -> int:
    """Twenty clients start on two equal servers, hear how long the line was, and route again: the larger crowd."""
    rng = random.Random(seed)
    names = PeerId("A"), PeerId("B")
    idle = View.of([server(name, 0, 4, 0.02, decode_tokens_per_s=1 / STEP_S) for name in names])
    first = [find_route(idle, 4, CostModel(), tokens_needed=1, rng=rng) for _ in range(20)]
    crowds = Counter(route.hops[0].peer for route in first)
    busy = View.of(replace(idle.servers[name], queue_s=STEP_S * crowds[name]) for name in names)
    second = [find_route(busy, 4, CostModel(), tokens_needed=1, rng=rng, current=route) for route in first]
    return max(Counter(route.hops[0].peer for route in second).values())


@pytest.mark.full
def test_clients_that_start_together_spread_after_one_round_of_replies() -> None:
    larger = sorted(share_after_one_round(seed) for seed in range(1000))
    assert larger[949] <= 12


# Batch work.


def throughput_route(servers: list[ServerView], rng: random.Random) -> Route:
    return find_route(View.of(servers), 4, CostModel(), tokens_needed=100, rng=rng, mode="max_throughput")


def shares(servers: list[ServerView], num_routes: int = 2000, *, hop: int = 0) -> dict[str, float]:
    """How often each server is taken for the first hop, or another."""
    rng = random.Random(6)
    taken = Counter(throughput_route(servers, rng).hops[hop].peer for _ in range(num_routes))
    return {peer: number / num_routes for peer, number in taken.items()}


def test_batch_work_spreads_by_measured_speed_not_by_span_length() -> None:
    fast = replaced(server("fast", 0, 4), prefill_tokens_per_s=300.0)
    halves = [
        replaced(server("half1", 0, 2), prefill_tokens_per_s=100.0),
        replaced(server("half2", 2, 4), prefill_tokens_per_s=900.0),
    ]
    assert shares([fast, *halves]) == pytest.approx({"fast": 0.75, "half1": 0.25}, abs=0.04)


def test_chains_that_share_a_bottleneck_do_not_count_it_twice() -> None:
    wide = [replaced(server(f"wide{number}", 0, 2), prefill_tokens_per_s=1000.0) for number in range(3)]
    narrow = replaced(server("narrow", 2, 4), prefill_tokens_per_s=100.0)
    other = replaced(server("other", 2, 4), prefill_tokens_per_s=100.0)
    assert shares([*wide, narrow, other], hop=1) == pytest.approx({"narrow": 0.5, "other": 0.5}, abs=0.04)


def test_batch_work_avoids_what_does_not_answer_leaves_or_is_full_while_others_can_do_it() -> None:
    good = server("good", 0, 4)
    doubtful = [
        server("silent", 0, 4, float("inf")),
        server("leaving", 0, 4, state="draining"),
        server("full", 0, 4, free_cache_tokens=0),
    ]
    assert shares([good, *doubtful], 50) == {"good": 1.0}
    assert shares(doubtful[:1], 5) == {"silent": 1.0}


def test_a_doubtful_server_that_one_block_needs_brings_back_only_those_that_host_it() -> None:
    good = server("good", 0, 3)
    silent = [server("silent 1", 0, 4, float("inf")), server("silent 2", 3, 4, float("inf"), decode_tokens_per_s=1e13)]
    elsewhere = [
        server("silent 3", 0, 3, float("inf")), server("leaving", 0, 3, state="draining"),
        server("full", 0, 3, free_cache_tokens=0),
    ]  # fmt: skip
    assert set(shares([good, *silent, *elsewhere], 200)) == {"good", "silent 1"}
    full = server("full", 3, 4, free_cache_tokens=0)
    assert shares([good, full, *silent, *elsewhere[:2]], 50, hop=1) == {"full": 1.0}


def test_batch_work_takes_no_link_that_is_announced_as_unreachable_or_failed_lately() -> None:
    a, b = server("A", 0, 2, next_rtts={"C": UNREACHABLE_RTT_S}), server("B", 0, 2)
    view = View.of([a, b, server("C", 2, 4), server("D", 2, 4)])
    lately = {(PeerId("B"), PeerId("D")): LINK_PENALTY_S / 2, (PeerId("A"), PeerId("D")): LINK_PENALTY_S / 4}
    assert links_taken(replace(view, link_penalties_s=lately)) == {("A", "D"), ("B", "C")}


def test_batch_work_over_barred_links_alone_takes_the_cheapest_chain() -> None:
    a, b = server("A", 0, 2, next_rtts={"C": UNREACHABLE_RTT_S}), server("B", 0, 2)
    failed = {(PeerId("B"), PeerId("C")): LINK_PENALTY_S}
    view = replace(View.of([a, b, server("C", 2, 4)]), link_penalties_s=failed)
    assert links_taken(view) == {("B", "C")}


def links_taken(view: View) -> set[tuple[PeerId, ...]]:
    rng = random.Random(6)
    found = (
        find_route(view, 4, CostModel(), tokens_needed=100, rng=rng, mode="max_throughput").hops for _ in range(100)
    )
    return {tuple(hop.peer for hop in hops) for hops in found}


# Speed, in CPU time: a busy machine is slow, not wrong.


def chained_view(num_servers: int, num_blocks: int, rng: random.Random) -> View:
    """Random spans over the whole model; each server has measured eight that may follow and eight that come before."""
    starts = [rng.randrange(num_blocks) if number > 40 else 4 * number % num_blocks for number in range(num_servers)]
    spans = {
        PeerId(f"peer{number}"): (start, min(start + rng.randrange(4, 24), num_blocks))
        for number, start in enumerate(starts)
    }
    servers: list[ServerView] = []
    for peer, (start, end) in spans.items():
        following = [other for other, (first, last) in spans.items() if first <= end < last]
        near = {str(other): rng.random() / 5 for other in rng.sample(following, min(8, len(following)))}
        before = [other for other, (_, last) in spans.items() if start <= last < end]
        seen = {str(other): int(10 ** rng.uniform(6, 8)) for other in rng.sample(before, min(8, len(before)))}
        servers.append(server(peer, start, end, rng.random() / 10, next_rtts=near, inflows=seen, num_blocks=num_blocks))
    failed = {(rng.choice(servers).peer, rng.choice(servers).peer): rng.random() for _ in range(num_servers // 10)}
    return replace(View.of(servers), link_penalties_s=failed)


@pytest.mark.parametrize(("num_servers", "num_blocks", "limit_s"), [(20, 80, 0.001), (1000, 126, 0.050)])
def test_a_search_is_quick(num_servers: int, num_blocks: int, limit_s: float) -> None:
    """CPU time on a machine like that of `docs/routing.md`: beside a yardstick, since others slow a busy one down."""
    rng = random.Random(3)
    view = chained_view(num_servers, num_blocks, rng)
    durations_s: list[float] = []
    yardsticks_s: list[float] = []
    for _ in range(20):
        durations_s.append(cpu_s(lambda: find_route(view, num_blocks, CostModel(), tokens_needed=100, rng=rng)))
        yardsticks_s.append(cpu_s(yardstick))
    slowness = max(1.0, sorted(yardsticks_s)[10] / YARDSTICK_S)
    assert sorted(durations_s)[18] < limit_s * slowness


YARDSTICK_S = 0.007


def yardstick() -> None:
    known: dict[int, float] = {}
    for number in range(50_000):
        known[number & 1023] = min(known.get(number & 1023, 1e9), number * 0.5)


def cpu_s(work: Callable[[], object]) -> float:
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


@pytest.mark.parametrize("bad", [{"near_tie": -0.1}, {"no_room_s": float("nan")}, {"unknown_tokens_per_s": 0.0}])
def test_constants_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        CostModel(**bad)
