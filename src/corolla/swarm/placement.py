"""Which blocks a server should host: where the swarm is weakest. Pure; `rebalance.py` says when to move later.

The rule of the predecessor: among all windows of the right length take the one whose throughputs, sorted, come first
in lexicographic order, so the worst-served block counts first, then the second worst. Windows that are nearly alike
by that are told apart by what the server would do there to the fastest chain, then by blocks that it has on disk.
A server that only announces to join counts like one that serves: its blocks are taken care of.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from corolla.errors import BadInput, MissingBlocks
from corolla.ids import PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.cost import CostModel
from corolla.swarm.route import find_route
from corolla.swarm.view import ServerView, View

NEAR_TIE: Final = 0.05
"""Throughputs and latencies within this share count as equal: measurements are no better than that."""
MAX_COMPARED: Final = 16
"""Windows whose effect on the fastest chain is computed; each takes a search, 20 ms in a thousand servers."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One server's place: blocks `[start, end)`, each of which it runs at `rate` tokens a second."""

    peer: PeerId
    start: int
    end: int
    rate: float

    def moved(self, span: range) -> "Placed":
        """The same server elsewhere; with more or fewer blocks each is slower or faster."""
        rate = self.rate * (self.end - self.start) / len(span)
        return Placed(self.peer, span.start, span.stop, rate)


def placed_servers(view: View, cost: CostModel) -> list[Placed]:
    """Everyone who serves or is about to, in the order of their ids."""
    servers = sorted(view.servers.values(), key=lambda server: server.peer)
    return [_placed(server, cost) for server in servers if server.announcement.state in ("joining", "online")]


def _placed(server: ServerView, cost: CostModel) -> Placed:
    said = server.announcement
    rate = said.decode_tokens_per_s or cost.unknown_tokens_per_s / (said.end - said.start)
    here = Placed(server.peer, said.start, said.end, rate)
    return here if said.moving_to is None else here.moved(range(*said.moving_to))


def block_rates(placed: Iterable[Placed], num_blocks: int) -> list[float]:
    """Tokens a second that all servers together put through each block. Exactly 0 where there is none."""
    steps, counts = [0.0] * (num_blocks + 1), [0] * (num_blocks + 1)
    for server in placed:
        steps[server.start] += server.rate
        steps[server.end] -= server.rate
        counts[server.start] += 1
        counts[server.end] -= 1
    pairs = zip(accumulate(steps[:-1]), accumulate(counts[:-1]), strict=True)
    return [rate if count else 0.0 for rate, count in pairs]


def windows(num_blocks: int, length: int, cuts: Collection[int] | None = None) -> list[range]:
    """Every span that a server of `length` blocks may take.

    `cuts`: the borders at which the model can be cut; None: all. Where they allow no span of exactly that length,
    shorter ones count, as long as can be. Raises BadInput when not even one fits.
    """
    borders = sorted({0, num_blocks, *(range(num_blocks) if cuts is None else cuts)})
    spans: list[range] = []
    for start in borders[:-1]:
        end = borders[bisect_right(borders, start + length) - 1]
        if end > start:
            spans.append(range(start, end))
    if not spans:
        least = min(after - before for before, after in pairwise(borders))
        raise BadInput(f"{length} blocks fit here, but the shortest span that this model can be cut into has {least}")
    longest = max(len(span) for span in spans)
    return [span for span in spans if len(span) == longest or cuts is not None]


def choose_span(
    view: View,
    num_to_host: int,
    *,
    joining: Announcement,
    peer: PeerId,
    cost: CostModel,
    cuts: Collection[int] | None = None,
    on_disk: Collection[int] = frozenset(),
) -> range:
    """Where this server helps most.

    `joining` is what it would announce (its model, speed and room; its span does not matter), `on_disk` the blocks
    whose weights it need not fetch. What the view says of the server itself is left out. Raises BadInput.
    """
    num_blocks = joining.num_blocks
    others = _when_all_have_joined(view.without([peer]))
    placed = placed_servers(others, cost)
    spans = windows(num_blocks, min(num_to_host, num_blocks), cuts)
    tied = near_weakest(block_rates(placed, num_blocks), spans)
    tied.sort(key=lambda span: (-_num_on_disk(span, on_disk), span.start))
    if len(tied) == 1:
        return tied[0]
    latencies = {span: _latency_s(others, span, joining, peer, cost) for span in tied[:MAX_COMPARED]}
    limit_s = min(latencies.values()) * (1 + NEAR_TIE)
    quick = [span for span, latency_s in latencies.items() if latency_s <= limit_s or math.isinf(limit_s)]
    return min(quick, key=lambda span: (-_num_on_disk(span, on_disk), span.start))


def _when_all_have_joined(view: View) -> View:
    """Those who are joining, or move, will serve there by the time that we do."""

    def arrived(server: ServerView, span: range) -> ServerView:
        said = server.announcement
        speed = said.decode_tokens_per_s * (said.end - said.start) / len(span)
        there = msgspec.structs.replace(
            said, state="online", start=span.start, end=span.stop, decode_tokens_per_s=speed, moving_to=None
        )
        return replace(server, announcement=there)

    return view.including(*(arrived(server, server.claim) for server in view.servers.values() if server.claim))


def near_weakest(rates: Sequence[float], spans: Sequence[range]) -> list[range]:
    """The windows that are served worst, near ties included; compared block by block from the worst on."""
    sorted_rates = {span: sorted(rates[span.start : span.stop]) for span in spans}
    weakest = min(sorted_rates.values())
    return [span for span, mine in sorted_rates.items() if _is_near(mine, weakest)]


def _is_near(mine: Sequence[float], weakest: Sequence[float]) -> bool:
    return all(rate <= least * (1 + NEAR_TIE) for rate, least in zip(mine, weakest, strict=False))


def _num_on_disk(span: range, on_disk: Collection[int]) -> int:
    return sum(block in on_disk for block in span)


def _latency_s(view: View, span: range, joining: Announcement, peer: PeerId, cost: CostModel) -> float:
    """Seconds of a step over the fastest chain with this server there; infinite while blocks are missing."""
    said = msgspec.structs.replace(joining, start=span.start, end=span.stop, state="online")
    there = view if view.num_blocks else View(joining.num_blocks)
    try:
        route = find_route(
            there.including(ServerView(peer, said, expires_at=math.inf)), joining.num_blocks, cost, tokens_needed=1,
            rng=random.Random(0),  # noqa: S311 - which of the best chains does not matter here
        )  # fmt: skip
    except MissingBlocks:
        return math.inf
    return route.cost_s
