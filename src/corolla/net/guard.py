"""How many streams others may open to us, and what becomes of a peer that opens too many. Pure: `now` is loop time.

Every transport asks its guard before it does anything for an incoming stream: no task, no handler, not one byte read.

    within the rates                take      it goes on to the gate
    above them                      close     closed at once
    above them again and again      cut       the connection is ended, with all that hangs on it; for a while, which
                                              grows with each time and fades, nothing of this peer is taken

Nonsense (a first message that is none, no proof of the swarm key) counts as many streams, so that who sends noise is
cut off long before it has had as many as an honest peer may have.

Rates hold by peer and by address group, because peer ids cost nothing. Listed peers are bound by their own rate alone,
so a flood in their network takes nothing from them; nor are they ever cut off.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from corolla.ids import PeerId, short
from corolla.net.bans import Ban, BanRules, after_fault
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import AddressGroup, group_of

log = logging.getLogger(__name__)

Verdict = Literal["take", "close", "cut"]

MAX_CUT_OFF: Final = 4096
"""Peers whose ban is remembered; beyond it those that come free soonest are forgotten."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What an honest peer never meets, whatever a server's defaults grant it.

    The most asks the server before this one on many routes: a stream for each of 256 sessions, all again when all are
    re-routed at once. A client has 64 sessions with two streams each, four control streams, and a ping now and then. In
    the long run a server admits 80 sessions a second from one address (`server/admission.py`).
    """

    peer: Rate = field(default=Rate(per_s=80, burst=640))
    group: Rate = field(default=Rate(per_s=320, burst=2560))
    """Of one address group: four such peers."""
    nonsense: float = 8.0
    """As how many streams one with nonsense counts."""
    refused: Rate = field(default=Rate(per_s=0.5, burst=32))
    """Streams of one peer that are closed before it is cut off: it has not slowed down."""
    cut: BanRules = field(default=BanRules())


class StreamGuard:
    """One transport's. Belongs to the loop it is used on."""

    def __init__(self, limits: StreamLimits | None = None, listed: frozenset[PeerId] = frozenset()) -> None:
        """`listed`: peers that keep their share whatever others do."""
        self.limits: Final = limits or StreamLimits()
        self.turned_away: Final[Counter[Verdict]] = Counter()
        """How many streams were not taken, by what was done."""
        self._listed = listed
        self._peers, self._groups = Buckets(self.limits.peer), Buckets(self.limits.group)
        self._refused = Buckets(self.limits.refused)
        self._bans: dict[PeerId, Ban] = {}

    def judge(self, peer: PeerId, address: str | None, now: float, *, num_open: int = 0) -> Verdict:
        """What to do with a stream that this peer has opened. `address`: None when the network cannot tell.

        `num_open`: how many we have with it already. Each holds a descriptor, of which a process has a thousand.
        """
        verdict = self._judge(peer, _group_of(address), now, num_open)
        if verdict != "take":
            self.turned_away[verdict] += 1
        return verdict

    def saw_nonsense(self, peer: PeerId, address: str | None, now: float) -> Verdict:
        """A stream that was taken held nonsense. "cut": it was once too often."""
        amount, group = self.limits.nonsense - 1, _group_of(address)
        if self.is_cut_off(peer, now):
            return "cut"
        if group is not None and peer not in self._listed:
            self._groups.take(group, now, amount)
        return "take" if self._peers.take(peer, now, amount) else self._refuse(peer, now)

    def is_cut_off(self, peer: PeerId, now: float) -> bool:
        ban = self._bans.get(peer)
        return ban is not None and ban.until > now

    def _judge(self, peer: PeerId, group: AddressGroup | None, now: float, num_open: int) -> Verdict:
        if self.is_cut_off(peer, now):
            return "cut"
        if num_open >= self.limits.peer.burst or not self._peers.take(peer, now):
            return self._refuse(peer, now)
        if group is not None and peer not in self._listed and not self._groups.take(group, now):
            return "close"  # perhaps its neighbours' doing: no reason to cut it off
        return "take"

    def _refuse(self, peer: PeerId, now: float) -> Verdict:
        if peer in self._listed or self._refused.take(peer, now):
            return "close"
        if peer not in self._bans and len(self._bans) >= MAX_CUT_OFF:
            del self._bans[min(self._bans, key=lambda known: self._bans[known].until)]
        ban = self._bans[peer] = after_fault(self.limits.cut, self._bans.get(peer), now)
        log.warning(
            "a peer that floods us with streams is cut off",
            extra={"peer": short(peer), "seconds": round(ban.until - now, 1)},
        )
        return "cut"


@lru_cache(maxsize=1024)
def _group_of(address: str | None) -> AddressGroup | None:
    """Of the address before: parsing takes longer than all the rest."""
    return group_of(address)
