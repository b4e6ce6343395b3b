"""When a server should leave its blocks for others: pure, and the same answer for everybody who sees the same.

There is no master, so every server computes the same plan for all from the same view, and carries out its own part
(`choose_move`). The plan comes from the present places by ever better single moves (`improve`); where blocks are
missing that no single move can cover, servers are pushed together until there is no gap (`close_gaps`); in small
swarms it is compared with placements from nothing, which find what needs several moves at once. Nobody starts to
move for less than a fifth (hysteresis), nor while leaving would uncover a block; so a plan is carried out from its
safe end, move by move, and looked at anew after each.

A step of the search raises the weakest block: of the servers that are elsewhere and can be spared there, each is
tried in each window over that block, and the best result is kept, by the sorted throughputs of all blocks, the worst
first.
"""

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.swarm.cost import CostModel
from corolla.swarm.placement import Placed, block_rates, near_weakest, placed_servers, windows
from corolla.swarm.view import View

LEAST_GAIN: Final = 0.2
"""What the plan must bring over what is: below it, moving costs more (the predecessor waits for 0.33)."""
SETTLED_GAIN: Final = 0.05
"""Once moving is worth it, it goes on until no more than this is left to gain (`server/placing.py`)."""
MAX_STEPS: Final = 64
"""Of one plan; each view is planned for anew, so a long plan only waits."""
MAX_TRIED: Final = 24
"""Servers tried for each step, those that can be spared most first."""
MAX_AFRESH: Final = 64
"""Servers up to which a plan from nothing is tried too: small swarms get stuck where two would have to move at once,
in large ones somebody always can."""
ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Model:
    """What placement must know of a model."""

    num_blocks: int
    cuts: frozenset[int] | None = None
    """Borders at which it can be cut; None: all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What could be done, and which part of it at once."""

    gain: float
    """Of the weakest block's throughput over what it is now; infinite where a gap would be closed."""
    moves: Mapping[PeerId, range]
    """The moves that are safe together now."""


def choose_move(view: View, own: PeerId, model: Model, cost: CostModel, *, least_gain: float) -> range | None:
    """Where this server should go now; None: it should stay, or wait until others have moved."""
    planned = plan_for(view, model, cost)
    return planned.moves.get(own) if planned.gain >= least_gain else None


def plan_for(view: View, model: Model, cost: CostModel) -> Plan:
    """The plan that everybody makes who sees this view; in it move only servers that are online, may, and do not
    already."""
    movable = frozenset(
        server.peer
        for server in view.servers.values()
        if server.is_online and server.claim is None and server.announcement.is_movable
    )
    return _planned(tuple(placed_servers(view, cost)), model, movable)


@lru_cache(maxsize=8)
def _planned(placed: tuple[Placed, ...], model: Model, movable: frozenset[PeerId]) -> Plan:
    """Made once for each swarm that is seen: it seldom changes from look to look."""
    return plan_moves(placed, model, movable=movable)


def plan_moves(placed: Sequence[Placed], model: Model, *, movable: Collection[PeerId] | None = None) -> Plan:
    """How these servers should move (`movable`: only some of them may)."""
    before = _weakest(placed, model)
    spread_evenly = math.fsum(server.rate * (server.end - server.start) for server in placed) / model.num_blocks
    if _gain(before, spread_evenly) < SETTLED_GAIN:
        return Plan(0.0, {})  # no placement is better than that
    targets = _targets(placed, model, {server.peer for server in placed} if movable is None else set(movable))
    gains = [_gain(before, _weakest(target, model)) for target in targets]
    for target, gain in zip(targets, gains, strict=True):
        if gain < SETTLED_GAIN:
            continue
        needed = without_idle_moves(placed, target, model) if before > 0 else target
        if moves := _safe_moves(placed, needed, model.num_blocks):
            return Plan(gain, moves)
    return Plan(max(gains), {})


def _gain(before: float, after: float) -> float:
    if before > 0:
        return after / before - 1
    return math.inf if after > 0 else 0.0


def plan(placed: Sequence[Placed], model: Model, movable: Collection[PeerId] | None = None) -> list[Placed]:
    """Better places for these servers (`movable`: only some of them may move), as good as the search finds."""
    return _targets(placed, model, {server.peer for server in placed} if movable is None else set(movable))[0]


def _targets(placed: Sequence[Placed], model: Model, free: Collection[PeerId]) -> list[list[Placed]]:
    """Where the servers might go, the preferred way first; a later one may be safe to begin when that is not."""
    improved = improve(placed, model, free)
    if _weakest(placed, model) == 0:
        # Blocks are missing: cover them first, in a way that can be begun from here; balance afterwards.
        pushed = close_gaps(placed, model, free)
        covering = [target for target in (improved, pushed) if _weakest(target, model) > 0]
        if covering:
            return covering
    if len(free) > MAX_AFRESH:
        return [improved]
    others = [improve(anew, model, free) for anew in places_afresh(placed, model, free)]
    best = max(others, key=lambda anew: _weakest(anew, model))
    is_worth = _gain(_weakest(improved, model), _weakest(best, model)) >= LEAST_GAIN
    return [best, improved] if is_worth else [improved]


def _weakest(placed: Iterable[Placed], model: Model) -> float:
    return min(block_rates(placed, model.num_blocks), default=0.0)


def places_afresh(placed: Sequence[Placed], model: Model, free: Collection[PeerId]) -> Iterator[list[Placed]]:
    """As if all free servers joined now, in several orders: the strongest first, the longest first, and by lot."""
    strongest = sorted(placed, key=lambda server: (-server.rate * (server.end - server.start), server.peer))
    yield _joined(strongest, model, free)
    yield _joined(sorted(strongest, key=lambda server: server.start - server.end), model, free)
    rng = random.Random(0)  # noqa: S311 - everybody must draw the same lots
    for _ in range(MAX_AFRESH // len(placed) if placed else 0):
        yield _joined(rng.sample(strongest, len(strongest)), model, free)


def _joined(ordered: Sequence[Placed], model: Model, free: Collection[PeerId]) -> list[Placed]:
    """One after the other each takes the weakest blocks, or stays where it is if that is as good."""
    done = [server for server in ordered if server.peer not in free]
    for server in ordered:
        if server.peer in free and (spans := _windows(server, model)):
            tied = near_weakest(block_rates(done, model.num_blocks), spans)
            stays = [span for span in tied if span.start == server.start]
            done.append(server.moved((stays or tied)[0]))
    return done


def improve(placed: Sequence[Placed], model: Model, free: Collection[PeerId]) -> list[Placed]:
    """Single moves, each the best one for the weakest block, until none helps."""
    now = {server.peer: server for server in placed}
    spans = {peer: _windows(server, model) for peer, server in now.items() if peer in free}
    for _ in range(MAX_STEPS):
        best = _best_move(now, spans, model.num_blocks)
        if best is None:
            break
        now[best.peer] = best
    return list(now.values())


def close_gaps(placed: Sequence[Placed], model: Model, free: Collection[PeerId]) -> list[Placed]:
    """The servers in their order, pushed left and then right as far as it takes to leave no gap, if they suffice."""
    if model.cuts is not None or not all(server.peer in free for server in placed):
        return list(placed)  # which borders and who stays would have to be searched; single moves must do
    ordered = sorted(placed, key=lambda server: (server.start, server.end, server.peer))
    reached, pushed = 0, list[Placed]()
    for server in ordered:
        start = min(server.start, reached)
        pushed.append(server.moved(range(start, start + server.end - server.start)))
        reached = max(reached, pushed[-1].end)
    reached = model.num_blocks
    for number in reversed(range(len(pushed))):
        server = pushed[number]
        end = max(server.end, reached)
        pushed[number] = server.moved(range(end - (server.end - server.start), end))
        reached = min(reached, pushed[number].start)
    return pushed if reached <= 0 else list(placed)


def without_idle_moves(placed: Sequence[Placed], target: Sequence[Placed], model: Model) -> list[Placed]:
    """The target without moves that the others made needless: its weakest block is as strong if those servers stay."""
    kept, least = {server.peer: server for server in target}, _weakest(target, model) * (1 - ROUNDING)
    for server in sorted(placed, key=lambda server: server.peer):
        if kept[server.peer] != server and _weakest({**kept, server.peer: server}.values(), model) >= least:
            kept[server.peer] = server
    return list(kept.values())


def _best_move(now: Mapping[PeerId, Placed], spans: Mapping[PeerId, Sequence[range]], num_blocks: int) -> Placed | None:
    """The move that raises the weakest block and leaves the best swarm; None when none raises it."""
    rates = block_rates(now.values(), num_blocks)
    worst = min(rates)
    weakest = rates.index(worst)
    best, best_rates = None, sorted(rates)
    for server in _spared_most(now, spans, rates, weakest):
        without = list(rates)
        for block in range(server.start, server.end):
            without[block] -= server.rate
        before, after = list(accumulate(without, min)), list(accumulate(reversed(without), min))[::-1]
        for span in spans[server.peer]:
            if weakest not in span or span.start == server.start:
                continue
            moved = server.moved(span)
            lowest = min(without[span.start : span.stop]) + moved.rate
            if span.start:
                lowest = min(lowest, before[span.start - 1])
            if span.stop < num_blocks:
                lowest = min(lowest, after[span.stop])
            if lowest < best_rates[0] * (1 - ROUNDING):
                continue  # most are ruled out here, before their rates are sorted
            inside = [rate + moved.rate for rate in without[span.start : span.stop]]
            reached = sorted([*without[: span.start], *inside, *without[span.stop :]])
            if _is_better(reached, best_rates):
                best, best_rates = moved, reached
    return best


def _spared_most(
    now: Mapping[PeerId, Placed], spans: Mapping[PeerId, Sequence[range]], rates: Sequence[float], weakest: int
) -> list[Placed]:
    """Those who may move, by what their present blocks would be left with."""
    candidates = [now[peer] for peer in spans]
    candidates.sort(key=lambda server: (server.rate - min(rates[server.start : server.end]), server.peer))
    return candidates[:MAX_TRIED]


def _is_better(rates: Sequence[float], than: Sequence[float]) -> bool:
    """Sorted throughputs compared from the worst on; equal up to rounding is not better."""
    for mine, other in zip(rates, than, strict=True):
        if abs(mine - other) > ROUNDING * max(mine, other, 1.0):
            return mine > other
    return False


def _windows(server: Placed, model: Model) -> tuple[range, ...]:
    return _windows_of(server.end - server.start, model)


@lru_cache(maxsize=256)
def _windows_of(length: int, model: Model) -> tuple[range, ...]:
    try:
        return tuple(windows(model.num_blocks, length, model.cuts))
    except BadInput:  # another's span that fits no border: it knows its model better than we do
        return ()


def _safe_moves(placed: Sequence[Placed], target: Iterable[Placed], num_blocks: int) -> dict[PeerId, range]:
    """Of the planned moves those that uncover nothing, even while all of these servers are under way.

    A server may be away from all of its blocks while it loads. In a swarm that has a gap nothing runs anyway: there
    it only must not leave blocks behind that nobody else hosts.
    """
    goals = {server.peer: range(server.start, server.end) for server in target}
    counts = [0] * num_blocks
    for server in placed:
        for block in range(server.start, server.end):
            counts[block] += 1
    is_broken = 0 in counts
    moves: dict[PeerId, range] = {}
    for server in sorted(placed, key=lambda server: server.peer):
        span, goal = range(server.start, server.end), goals[server.peer]
        given_up = [block for block in span if not (is_broken and block in goal)]
        if goal != span and all(counts[block] > 1 for block in given_up):
            moves[server.peer] = goal
            for block in given_up:
                counts[block] -= 1
    return moves
