"""Which hop has become much slower than it was, and when that is worth leaving it: pure.

A slow server answers heartbeats and loses nothing, so nobody else finds it. Each output brings what every hop took
for its step, by that hop's own clock; here they become a `Pace` each:

    could_be     whether the times that a step brought are no longer than it took: a tail could write what it likes
    after_step   a step's time → the hop's pace: what is usual, and the newest few
    is_stuck     whether a step that has not come back yet has been at work for too long
    pick_slow    the hop whose newest steps were all far beyond the usual, while the other hops' were not
    is_worth     whether another server promises enough to pay for a replay of the whole text
    after_look   when the session may look again: a slow swarm is not hammered

One slow step is jitter. Slowness that all hops share has a common cause, which a move would carry along.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from corolla.wire.messages import HopTiming

STEPS_TO_KNOW: Final = 8
"""Before so many steps nothing is usual yet: the first ones warm caches up."""
STEPS_TO_BELIEVE: Final = 6
"""All of the newest must be slow: a busy machine's jitter passes sooner."""
SLOWER: Final = 4.0
"""Times its usual. A server that shares its device with three more sessions may take that long, and is no worse off
than others will be; one that is throttled or swaps takes ten times as long and more."""
LEAST_LOSS_S: Final = 0.05
"""A step must lose at least this much: below it nobody notices, and clocks and schedulers err as much."""
GAIN: Final = 0.1
"""Weight of a step in what is usual, once that is known."""
STUCK_S: Final = 15.0
STUCK_TIMES: Final = 50.0
"""Times its usual, and never below `STUCK_S`, for one step that has not come back."""
WORTH: Final = 2.0
"""A server is left for one that costs at most half: the estimate of the other is rough, and a move costs a replay."""
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 600.0
"""Between two looks for something better; each is twice as long as the one before."""


CLOCKS_DIFFER_S: Final = 0.05
"""By so much in all the hops' own times may be longer than what we measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long one hop takes for a decode step, waiting included, in seconds."""

    usual_s: float
    num_steps: int
    newest_s: tuple[float, ...]
    """Of the last `STEPS_TO_BELIEVE` steps."""

    @property
    def slowdown(self) -> float:
        """How many times the usual even the quickest of the newest steps took; 1 while too little is known."""
        is_known = self.num_steps >= STEPS_TO_KNOW + STEPS_TO_BELIEVE
        return _times_usual(self.usual_s, min(self.newest_s)) if is_known else 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """When a session may look for a quicker server again; times are loop times."""

    until: float = 0.0
    pause_s: float = FIRST_PAUSE_S


def could_be(timings: Sequence[HopTiming], took_s: float) -> bool:
    """Whether the hops, one after another, could have taken so long in a step that took us so long.

    Times come by way of the tail, and no hop signs its own. One that writes of others what never was would have them
    left. To have it believed a tail must really hold the step up for that long, each time, for no more than one look
    in `Patience`'s pauses.
    """
    return sum(timing.queue_s + timing.compute_s for timing in timings) <= took_s + CLOCKS_DIFFER_S


def after_step(pace: Pace | None, step_s: float) -> Pace:
    """The pace after one more step. Slow steps do not make slowness usual."""
    if pace is None:
        return Pace(step_s, 1, (step_s,))
    newest_s = (*pace.newest_s, step_s)[-STEPS_TO_BELIEVE:]
    gain = GAIN
    if pace.num_steps < STEPS_TO_KNOW:
        gain = 1 / (pace.num_steps + 1)
    elif _times_usual(pace.usual_s, step_s) >= SLOWER:
        gain = 0.0
    return replace(
        pace, usual_s=pace.usual_s + gain * (step_s - pace.usual_s), num_steps=pace.num_steps + 1, newest_s=newest_s
    )


def is_stuck(pace: Pace, busy_s: float) -> bool:
    """Whether a hop that has been at work for so long will hardly come back: what it is at may be a stranger's prompt,
    but waiting for it costs more than a replay elsewhere."""
    return pace.num_steps >= STEPS_TO_KNOW and busy_s >= max(STUCK_S, STUCK_TIMES * pace.usual_s)


def pick_slow(paces: Sequence[Pace]) -> int | None:
    """The hop, of a route's, that has become slow by itself: the worst of them; None: there is none."""
    slowdowns = [pace.slowdown for pace in paces]
    worst = max(range(len(paces)), key=lambda index: slowdowns[index], default=None)
    if worst is None:
        return None
    others = statistics.median(slowdowns[:worst] + slowdowns[worst + 1 :] or [1.0])
    return worst if slowdowns[worst] >= SLOWER * others else None


def is_worth(present_s: float, other_s: float) -> bool:
    """Whether a place that costs `present_s` a step should be left for one of `other_s`."""
    return other_s * WORTH <= present_s


def after_look(patience: Patience, now: float) -> Patience:
    return Patience(now + patience.pause_s, min(2 * patience.pause_s, LONGEST_PAUSE_S))


def _times_usual(usual_s: float, step_s: float) -> float:
    """1 when the difference is too small to matter."""
    return 1.0 if step_s - usual_s < LEAST_LOSS_S else step_s / max(usual_s, LEAST_LOSS_S / SLOWER)
