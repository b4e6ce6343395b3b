"""Round trips to servers: smoothed, ageing, and which servers to measure next. Pure."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.ids import PeerId
from corolla.swarm.view import ServerView, View

RTT_LIFE_S: Final = 300.0
"""An older measurement says nothing any more (predecessor: 300 s)."""
GAIN: Final = 0.2
"""Weight of a new sample against a recent one (predecessor: 0.2); it grows with the age of what it replaces."""
SAMPLED_AT_ONCE: Final = 12
"""A third each for the first, the middle and the last servers of a chain."""


@dataclass(frozen=True, slots=True)
class Rtt:
    """A smoothed round trip in seconds (infinite: the peer did not answer), and the loop time of its last sample."""

    rtt_s: float
    at: float


def after_sample(old: Rtt | None, sample_s: float, now: float) -> Rtt:
    """`sample_s` infinite: no answer. One lost answer replaces everything, and so does the first one after it."""
    if old is None or math.isinf(old.rtt_s) or math.isinf(sample_s):
        return Rtt(sample_s, now)
    gain = min(1.0, max(GAIN, (now - old.at) / RTT_LIFE_S))
    return Rtt(old.rtt_s + gain * (sample_s - old.rtt_s), now)


def current(rtts: Mapping[PeerId, Rtt], now: float) -> dict[PeerId, float]:
    """The round trips that still count."""
    return {peer: rtt.rtt_s for peer, rtt in rtts.items() if now - rtt.at < RTT_LIFE_S}


def pick_to_sample(
    view: View, blocks: range, rtts: Mapping[PeerId, Rtt], rng: random.Random, *, limit: int = SAMPLED_AT_ONCE
) -> list[PeerId]:
    """Whom to measure now: from both ends and the middle of the chain alike, the longest unmeasured first."""
    groups: tuple[list[ServerView], ...] = ([], [], [])
    for server in view.servers.values():
        at_start, at_end = server.start <= blocks.start < server.end, server.start < blocks.stop <= server.end
        groups[0 if at_start else 2 if at_end else 1].append(server)
    picked: list[PeerId] = []
    for number, group in enumerate(sorted(groups, key=len)):  # the smallest first: the others take what it leaves
        share = (limit - len(picked)) // (len(groups) - number)
        picked += _longest_unmeasured(group, rtts, rng, share)
    return picked


def _longest_unmeasured(
    servers: Sequence[ServerView], rtts: Mapping[PeerId, Rtt], rng: random.Random, number: int
) -> list[PeerId]:
    def age(peer: PeerId) -> tuple[float, float]:
        return (rtts[peer].at if peer in rtts else -math.inf), rng.random()

    return sorted((server.peer for server in servers), key=age)[:number]
