"""What the peers of a swarm say of us: our clock, whether they can dial us, and how far they are."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Final

from corolla.errors import HopFailed
from corolla.ids import PeerId
from corolla.net.findings import Finding
from corolla.net.libp2p.transport import Libp2pTransport
from corolla.net.reachable import check_reachable
from corolla.net.records import CLOCK_SKEW_S

ASK_TIMEOUT_S: Final = 3.0
MAX_ASKED: Final = 16
NOTICED_SKEW_S: Final = 3.0
_NOBODY: Final = "ask again in a minute, or --join another peer of the swarm"


async def examine_swarm(transport: Libp2pTransport, *, rng: random.Random | None = None) -> list[Finding]:
    """Clock, reach and round trips of a transport that has joined. Bounded in time."""
    peers = transport.met_peers()[:MAX_ASKED]
    clocks, reach = await asyncio.gather(_compare_clocks(transport, peers), check_reachable(transport, rng=rng))
    round_trips = await _ping_all(transport, peers)  # last, when nothing else keeps either side busy
    return [judge_clock(clocks), reach, judge_round_trips(round_trips, len(peers))]


def judge_clock(ahead_s: Sequence[float]) -> Finding:
    """Of how far peers' clocks are ahead of ours: one that is off is theirs, most of them ours."""
    if not ahead_s:
        return Finding("clock", "unsure", "no peer was there to compare clocks with", _NOBODY)
    middle = statistics.median(ahead_s)
    if abs(middle) <= NOTICED_SKEW_S:
        odd = sum(abs(each) > NOTICED_SKEW_S for each in ahead_s)
        text = f"within {max(NOTICED_SKEW_S, abs(middle)):g} s of the peers'"
        return Finding("clock", "ok", text if not odd else f"{text}; {odd} of {len(ahead_s)} peers have theirs wrong")
    text = f"this machine's clock is {abs(middle):.0f} s {'behind' if middle > 0 else 'ahead of'} the peers'"
    state = "unsure" if abs(middle) <= CLOCK_SKEW_S else "bad"
    return Finding("clock", state, text, "turn on network time (`timedatectl set-ntp true`)")


def judge_round_trips(seconds: Sequence[float], asked: int) -> Finding:
    if not seconds:
        if not asked:
            return Finding("round trips", "unsure", "no peer was there to be asked", _NOBODY)
        return Finding(
            "round trips", "bad", f"none of {asked} peers answered a ping", "see whether the network drops them"
        )
    said = ", ".join(f"{1000 * each:.1f}" for each in (min(seconds), statistics.median(seconds), max(seconds)))
    text = f"{said} ms (nearest, median, farthest of {len(seconds)})"
    if len(seconds) < asked:
        return Finding(
            "round trips", "unsure", f"{text}; {asked - len(seconds)} did not answer", "ask again in a minute"
        )
    return Finding("round trips", "ok", text)


async def _compare_clocks(transport: Libp2pTransport, peers: Sequence[PeerId]) -> list[float]:
    async def compare(peer: PeerId) -> float | None:
        try:
            return await transport.clock_ahead_s(peer, timeout_s=ASK_TIMEOUT_S)
        except HopFailed:
            return None

    return [ahead_s for ahead_s in await asyncio.gather(*map(compare, peers)) if ahead_s is not None]


async def _ping_all(transport: Libp2pTransport, peers: Sequence[PeerId]) -> list[float]:
    async def ping(peer: PeerId) -> float | None:
        try:
            return await transport.ping(peer, timeout_s=ASK_TIMEOUT_S)
        except HopFailed:
            return None

    return [rtt_s for rtt_s in await asyncio.gather(*map(ping, peers)) if rtt_s is not None]
