"""Small swarms in which every placement can be tried: what placement is graded by."""

import itertools
import random
from collections.abc import Sequence

from corolla.ids import PeerId
from corolla.swarm.placement import Placed, block_rates, near_weakest, windows
from corolla.swarm.rebalance import LEAST_GAIN, Model, plan_moves

MAX_ROUNDS = 50


def optimum(placed: Sequence[Placed], num_blocks: int) -> float:
    """The most that the weakest block can get, over every placement of these servers."""
    options = [
        [s.moved(range(start, start + s.end - s.start)) for start in range(num_blocks - (s.end - s.start) + 1)]
        for s in placed
    ]
    return max(min(block_rates(combination, num_blocks)) for combination in itertools.product(*options))


def random_small_swarm(rng: random.Random) -> tuple[list[Placed], int]:
    """A few servers of any length and speed that joined one after the other by the rule, and the number of blocks."""
    num_blocks = rng.randrange(4, 9)
    placed: list[Placed] = []
    is_uniform = rng.random() < 0.3
    for number in range(rng.randrange(2, 6)):
        length = rng.randrange(max(1, num_blocks // 4), num_blocks + 1)
        span = near_weakest(block_rates(placed, num_blocks), windows(num_blocks, length))[0]
        rate = 5.0 if is_uniform else rng.uniform(1, 10)
        placed.append(Placed(PeerId(f"p{number}"), span.start, span.stop, rate))
    return placed, num_blocks


def settle(placed: Sequence[Placed], model: Model) -> list[list[Placed]]:
    """The places after each round of safe moves, the first as given, until nobody moves any more.

    Raises RuntimeError when they never come to rest.
    """
    rounds = [list(placed)]
    while len(rounds) <= MAX_ROUNDS:
        planned = plan_moves(rounds[-1], model)
        if planned.gain < LEAST_GAIN or not planned.moves:
            return rounds
        rounds.append([s.moved(planned.moves[s.peer]) if s.peer in planned.moves else s for s in rounds[-1]])
    raise RuntimeError(f"still moving after {MAX_ROUNDS} rounds")
