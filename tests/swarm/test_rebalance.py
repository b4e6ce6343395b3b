"""Servers move for a good reason only, never so that a block is left alone, and end near the best there is."""

import itertools
import math
import random
import statistics

from corolla.apps.sim.small import optimum, random_small_swarm, settle
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement, State
from corolla.swarm.cost import CostModel
from corolla.swarm.placement import Placed, block_rates
from corolla.swarm.rebalance import LEAST_GAIN, Model, choose_move, plan, plan_moves, without_idle_moves
from corolla.swarm.view import ServerView, View


def places(*spans: tuple[int, int, float]) -> list[Placed]:
    return [Placed(PeerId(f"p{number}"), start, end, rate) for number, (start, end, rate) in enumerate(spans)]


def settled(placed: list[Placed], model: Model) -> tuple[list[Placed], int]:
    """Every safe move of every plan carried out until nobody moves; how many there were. Never uncovers a block."""
    rounds = settle(placed, model)
    num_moves = 0
    for before, after in itertools.pairwise(rounds):
        staying = [now for was, now in zip(before, after, strict=True) if was == now]
        num_moves += len(before) - len(staying)
        rates_before = block_rates(before, model.num_blocks)
        if min(rates_before) > 0:
            assert min(block_rates(staying, model.num_blocks)) > 0
        rates_after = block_rates(after, model.num_blocks)
        assert all(now > 0 for was, now in zip(rates_before, rates_after, strict=True) if was > 0)
    return rounds[-1], num_moves


def test_a_spare_server_closes_a_gap() -> None:
    planned = plan_moves(places((0, 4, 5.0), (0, 4, 5.0), (4, 8, 5.0)), Model(12))
    assert planned.gain == math.inf
    assert dict(planned.moves) == {"p0": range(8, 12)}


def test_nobody_moves_for_less_than_a_fifth_or_when_it_would_uncover_a_block() -> None:
    assert plan_moves(places((0, 4, 5.0), (4, 8, 4.5), (0, 8, 1.0)), Model(8)).gain < LEAST_GAIN
    alone, _ = settled(places((0, 4, 5.0), (4, 8, 1.0)), Model(8))
    assert [(s.start, s.end) for s in alone] == [(0, 4), (4, 8)]


def test_servers_are_pushed_together_where_only_that_covers_all_blocks() -> None:
    """4 + 4 + 4 blocks over 12: each must move a little, in an order that leaves nothing behind."""
    final, num_moves = settled(places((0, 4, 5.0), (3, 7, 5.0), (6, 10, 5.0)), Model(12))
    assert sorted((s.start, s.end) for s in final) == [(0, 4), (4, 8), (8, 12)]
    assert num_moves >= 2


def test_moves_that_the_others_made_needless_are_left_out_and_the_weakest_block_is_as_strong() -> None:
    placed = places((0, 4, 5.0), (4, 8, 4.0), (0, 4, 2.0), (0, 4, 1.0))
    target = [*placed[:2], placed[2].moved(range(4, 8)), placed[3].moved(range(4, 8))]
    needed = without_idle_moves(placed, target, Model(8))
    assert [(server.peer, server.start) for server in needed if server not in placed] == [("p3", 4)]
    assert min(block_rates(needed, 8)) >= min(block_rates(target, 8))
    rng = random.Random(3)
    num_spared = 0
    for _ in range(300):
        placed, num_blocks = random_small_swarm(rng)
        target = plan(placed, Model(num_blocks))
        needed = without_idle_moves(placed, target, Model(num_blocks))
        assert min(block_rates(needed, num_blocks)) >= min(block_rates(target, num_blocks)) * (1 - 1e-6)
        assert set(needed) <= {*target, *placed}
        num_spared += len(set(placed) - set(target)) - len(set(placed) - set(needed))
    assert num_spared > 0


def test_too_few_servers_stay_where_they_are() -> None:
    assert not plan_moves(places((0, 4, 5.0), (2, 6, 5.0)), Model(12)).moves


def test_borders_of_the_model_are_kept() -> None:
    model = Model(12, frozenset([0, 4, 8]))
    final, _ = settled(places((0, 4, 5.0), (0, 4, 5.0), (0, 4, 5.0)), model)
    assert sorted((s.start, s.end) for s in final) == [(0, 4), (4, 8), (8, 12)]


def test_of_the_servers_that_see_the_same_only_those_move_that_the_common_plan_names() -> None:
    def server(name: str, start: int, end: int, state: State = "online", *, is_movable: bool = True) -> ServerView:
        said = Announcement(
            state=state, start=start, end=end, num_blocks=8, fingerprint=Fingerprint("0" * 32), model_name="model",
            dtype="float32", decode_tokens_per_s=5.0, is_movable=is_movable,
        )  # fmt: skip
        return ServerView(PeerId(name), said, expires_at=0.0)

    def moves(view: View) -> dict[str, range | None]:
        return {
            peer: span
            for peer in view.servers
            if (span := choose_move(view, peer, Model(8), CostModel(), least_gain=LEAST_GAIN)) is not None
        }

    crowded = View.of([server("a", 0, 4), server("b", 0, 4), server("c", 0, 4)])
    assert moves(crowded) == {"a": range(4, 8)}
    claimed = View.of([server("a", 4, 8, "joining"), server("b", 0, 4), server("c", 0, 4)])
    assert not moves(claimed)
    leaving = View.of([server("a", 0, 4, "draining"), server("b", 0, 4), server("c", 0, 4)])
    assert moves(leaving) == {"b": range(4, 8)}
    pinned = View.of([server(name, 0, 4, is_movable=name == "c") for name in "abc"])
    assert moves(pinned) == {"c": range(4, 8)}


# Against exhaustive search.


def test_small_swarms_end_within_a_twentieth_of_the_best_placement_there_is() -> None:
    rng = random.Random(7)
    shares: list[float] = []
    planned: list[float] = []
    while len(shares) < 200:
        placed, num_blocks = random_small_swarm(rng)
        best = optimum(placed, num_blocks)
        if best == 0:
            continue
        model = Model(num_blocks)
        planned.append(min(block_rates(plan(placed, model), num_blocks)) / best)
        shares.append(min(block_rates(settled(placed, model)[0], num_blocks)) / best)
    assert statistics.mean(shares) >= 0.95
    assert min(shares) >= 1 / (1 + LEAST_GAIN) - 0.15
    assert statistics.mean(planned) >= 0.99


def test_no_block_stays_uncovered_that_any_placement_could_cover() -> None:
    """Servers anywhere at all, as after a disaster: those that suffice end with every block covered."""
    rng = random.Random(8)
    num_covered = 0
    for _ in range(300):
        num_blocks = rng.randrange(4, 20)
        spans: list[tuple[int, int, float]] = []
        for _ in range(rng.randrange(2, 7)):
            length = rng.randrange(1, num_blocks)
            start = rng.randrange(num_blocks - length + 1)
            spans.append((start, start + length, rng.uniform(1, 10)))
        if sum(end - start for start, end, _ in spans) < num_blocks:
            continue
        final, _ = settled(places(*spans), Model(num_blocks))
        assert min(block_rates(final, num_blocks)) > 0
        num_covered += 1
    assert num_covered > 150
