"""For how long a peer that misbehaved is left alone: bans that grow with each fault and fade with time. Pure.

Clients hold them against servers (`swarm/bans.py` says on what evidence), a transport against peers that flood it with
streams (`net/guard.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BanRules:
    """How long a peer is left alone, in seconds."""

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
    """One peer's faults as remembered; times are loop times."""

    faults: float
    """Faded: a count of two that is one half-life old is one."""
    at: float
    until: float


def after_fault(rules: BanRules, ban: Ban | None, now: float) -> Ban:
    """The ban of a peer that has just done wrong."""
    faults = 1.0 if ban is None else 1.0 + remembered(rules, ban, now)
    seconds = min(rules.first_s * 2 ** (min(faults, 64.0) - 1), rules.longest_s)
    return Ban(faults, now, now + seconds)


def remembered(rules: BanRules, ban: Ban, now: float) -> float:
    """How many faults are left of the count by now."""
    return ban.faults * 0.5 ** ((now - ban.at) / rules.forget_half_s)
