"""When a server may be asked again after it failed: bans that grow with each fault and are forgotten with time. Pure.

A ban answers only to this peer's own evidence of the server's fault (a reset, silence, a wrong shape): a refusal, a
caller's mistake or a neighbour's word never makes one. A success lifts it at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from corolla.ids import PeerId
from corolla.swarm.view import View


@dataclass(frozen=True, slots=True)
class BanRules:
    """How long a server is left alone, in seconds."""

    first_s: float = 15.0
    """After one fault (predecessor: 15 s); each fault more doubles it."""
    longest_s: float = 600.0
    forget_half_s: float = 300.0
    """Time without a fault in which half of the count of faults is forgotten."""

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s or not self.forget_half_s > 0:
            raise ValueError(f"bans need 0 < first_s ≤ longest_s and forget_half_s above 0, not {self}")


@dataclass(frozen=True, slots=True)
class Ban:
    """One server's faults as remembered; times are loop times."""

    faults: float
    """Faded: a count of two that is one half-life old is one."""
    at: float
    until: float


def after_fault(rules: BanRules, ban: Ban | None, now: float) -> Ban:
    """The ban of a server that has just failed."""
    faults = 1.0 if ban is None else 1.0 + remembered(rules, ban, now)
    seconds = min(rules.first_s * 2 ** (min(faults, 64.0) - 1), rules.longest_s)
    return Ban(faults, now, now + seconds)


def remembered(rules: BanRules, ban: Ban, now: float) -> float:
    """How many faults are left of the count by now."""
    return ban.faults * 0.5 ** ((now - ban.at) / rules.forget_half_s)


def without_banned(view: View, bans: Mapping[PeerId, Ban], blocks: range, now: float) -> View:
    """The view without banned servers; where that would uncover a block, those that come free soonest stay."""
    banned = {peer: ban.until for peer, ban in bans.items() if ban.until > now and peer in view.servers}
    if not banned:
        return view
    needed: set[PeerId] = set()
    while lacking := _uncovered(view, banned.keys() - needed, blocks):
        peer = min(
            _hosts(view, banned.keys() - needed, lacking[0]), key=lambda peer: (banned[peer], peer), default=None
        )
        if peer is None:
            blocks = range(lacking[0] + 1, blocks.stop)  # nobody at all hosts this one
        else:
            needed.add(peer)
    return view.without(banned.keys() - needed)


def _uncovered(view: View, gone: Iterable[PeerId], blocks: range) -> list[int]:
    missing = set(view.without(gone).missing_blocks)
    return [block for block in blocks if block in missing]


def _hosts(view: View, peers: Iterable[PeerId], block: int) -> list[PeerId]:
    servers = (view.servers[peer] for peer in peers)
    return [server.peer for server in servers if server.is_usable and server.start <= block < server.end]
