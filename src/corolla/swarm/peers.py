"""What this peer learnt about others by its own dealings: round trips, load, faults, bad links.

Sessions and pings feed it; `applied` puts it all into a view, and from then on routing is a pure function of that
view. No clock of its own: every `now` is a loop time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeVar

from corolla.ids import PeerId
from corolla.swarm.bans import Ban, BanRules, after_fault, remembered, without_banned
from corolla.swarm.cost import CostModel, idle_block_s
from corolla.swarm.load import Load, after_step, after_word, blended
from corolla.swarm.rtt import Rtt, after_sample, current
from corolla.swarm.view import Link, ServerView, View

MAX_PEERS: Final = 4096
"""Of each kind of knowledge; beyond it the oldest is forgotten, so that invented peers cost no memory."""
LINK_PENALTY_S: Final = 0.5
"""What a link that just failed costs: more than a usual hop, less than a full cache."""
LINK_PENALTY_HALF_S: Final = 60.0
"""Half of the penalty is forgiven after this time."""
LEAST_PENALTY_S: Final = 0.001
LOAD_LIFE_S: Final = 300.0

Key = TypeVar("Key")
Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class Penalty:
    """Seconds added to a link, as of a loop time."""

    seconds: float
    at: float

    def by(self, now: float) -> float:
        return self.seconds * 0.5 ** ((now - self.at) / LINK_PENALTY_HALF_S)


class PeerBook:
    """Owns what is known; one for each client (or server), fed on its event loop."""

    def __init__(self, rules: BanRules | None = None) -> None:
        self._rules = rules or BanRules()
        self._rtts: dict[PeerId, Rtt] = {}
        self._loads: dict[PeerId, Load] = {}
        self._bans: dict[PeerId, Ban] = {}
        self._penalties: dict[Link, Penalty] = {}

    @property
    def rtts(self) -> Mapping[PeerId, Rtt]:
        return self._rtts

    def saw_rtt(self, peer: PeerId, rtt_s: float, now: float) -> None:
        """A measured round trip."""
        self._rtts[peer] = after_sample(self._rtts.get(peer), rtt_s, now)
        _forget_oldest(self._rtts, lambda rtt: rtt.at)

    def saw_no_answer(self, peer: PeerId, now: float) -> None:
        """A ping without an answer: routes avoid the peer, but no ban follows from it."""
        self.saw_rtt(peer, math.inf, now)

    def saw_step(
        self, peer: PeerId, *, queue_s: float, compute_s: float, num_blocks: int, num_tokens: int, now: float
    ) -> None:
        """A reply to a step of `num_tokens` new tokens a row, through `num_blocks` blocks."""
        block_s = compute_s / num_blocks if num_tokens == 1 else None
        self._loads[peer] = after_step(self._loads.get(peer), queue_s=queue_s, block_s=block_s, now=now)
        _forget_oldest(self._loads, lambda load: load.at)

    def saw_queue(self, peer: PeerId, queue_s: float, now: float) -> None:
        """What a heartbeat says of the server's line."""
        self._loads[peer] = after_word(self._loads.get(peer), queue_s, now)
        _forget_oldest(self._loads, lambda load: load.at)

    def saw_fault(self, peer: PeerId, now: float) -> float:
        """Our own evidence that this server failed. Returns for how many seconds it is left alone."""
        ban = self._bans[peer] = after_fault(self._rules, self._bans.get(peer), now)
        _forget_oldest(self._bans, lambda ban: ban.at)
        return ban.until - now

    def saw_success(self, peer: PeerId) -> None:
        """The server did what it was asked: no ban any more, nor a memory of its faults."""
        self._bans.pop(peer, None)

    def forget_faults(self) -> None:
        """They were none: what failed was this side."""
        self._bans.clear()
        self._penalties.clear()

    def saw_link_fault(self, link: Link, now: float) -> None:
        """Somebody says that these two cannot reach each other: the link costs more for a while, neither of them."""
        old = self._penalties.get(link)
        self._penalties[link] = Penalty(LINK_PENALTY_S + (0.0 if old is None else old.by(now)), now)
        _forget_oldest(self._penalties, lambda penalty: penalty.at)

    def banned(self, now: float) -> dict[PeerId, float]:
        """Seconds left of each ban."""
        return {peer: ban.until - now for peer, ban in self._bans.items() if ban.until > now}

    def faulted_at(self, peer: PeerId) -> float:
        """Loop time of the server's last fault that is remembered; long ago if there is none."""
        return self._bans[peer].at if peer in self._bans else -math.inf

    def faults(self, peer: PeerId, now: float) -> float:
        """The server's faults as far as they are remembered."""
        return remembered(self._rules, self._bans[peer], now) if peer in self._bans else 0.0

    def applied(self, view: View, blocks: range, cost: CostModel, now: float) -> View:
        """The view as this peer should see it. A ban that would uncover one of `blocks` is ignored."""
        rtts = current(self._rtts, now)
        seen = {
            peer: self._seen(server, rtts.get(peer), cost, now) if peer in rtts or peer in self._loads else server
            for peer, server in view.servers.items()
        }
        penalties_s = {link: penalty.by(now) for link, penalty in self._penalties.items()}
        known = replace(
            view,
            servers=MappingProxyType(seen),
            link_penalties_s={link: seconds for link, seconds in penalties_s.items() if seconds > LEAST_PENALTY_S},
        )
        return without_banned(known, self._bans, blocks, now)

    def _seen(self, server: ServerView, rtt_s: float | None, cost: CostModel, now: float) -> ServerView:
        load = self._loads.get(server.peer)
        if load is None or now - load.at > LOAD_LIFE_S:
            return replace(server, rtt_s=rtt_s)
        age_s, block_s = now - load.at, None
        if load.block_s is not None:
            block_s = blended(load.block_s, idle_block_s(cost, server), age_s)
        queue_s = blended(load.queue_s, server.announcement.queue_s, age_s)
        return replace(server, rtt_s=rtt_s, queue_s=queue_s, block_s=block_s)


def _forget_oldest(known: dict[Key, Known], at: Callable[[Known], float]) -> None:
    """Bounds what strangers can make us remember; a quarter goes at once, so that it seldom has to."""
    if len(known) > MAX_PEERS:
        for key in sorted(known, key=lambda key: at(known[key]))[: MAX_PEERS // 4]:
            del known[key]
