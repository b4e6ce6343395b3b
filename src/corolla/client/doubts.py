"""Links between servers of a route that failed: when the client stands between the two, and for how long. Pure.

first fault                       the two may try again at once: streams break for many reasons
another before it is forgotten    the client stands between; after a pause the two may try again, between two steps
a fault then                      the same with a pause twice as long: each try may cost a step some seconds
no fault for long                 forgotten
"""

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 900.0
"""A try costs at most what a server takes to find that its dial fails: 5 s of 900 hardly show."""
FORGOTTEN_AFTER_S: Final = 120.0
"""Without a fault, and at least as long as the pause was."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Of one link; times are loop times."""

    pause_s: float
    """How long the client stands between the two this time; 0: it does not."""
    until: float
    forgotten_at: float


def after_fault(now: float) -> Doubt:
    """The two may try again."""
    return Doubt(0.0, now, now + FORGOTTEN_AFTER_S)


def after_parting(doubt: Doubt | None, now: float) -> Doubt:
    """The client stands between the two from now on."""
    known_s = doubt.pause_s if doubt is not None and is_remembered(doubt, now) else 0.0
    pause_s = min(max(2 * known_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
    return Doubt(pause_s, now + pause_s, now + pause_s + max(pause_s, FORGOTTEN_AFTER_S))


def is_remembered(doubt: Doubt | None, now: float) -> bool:
    return doubt is not None and now < doubt.forgotten_at


def may_try(doubt: Doubt | None, now: float) -> bool:
    """Whether two servers between which the client stands may push to each other again."""
    return doubt is None or now >= doubt.until
