"""How busy a server is, as its replies tell this peer; fades into what it announces. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Final

FADES_IN_S: Final = 30.0
"""After this time a measurement weighs 1/e against the announcement, which is renewed every 45 s at the latest."""
GAIN: Final = 0.3
"""Weight of one step against those before: three steps tell a change, one outlier does not."""


@dataclass(frozen=True, slots=True)
class Load:
    """Smoothed over steps; `at` is the loop time of the last one."""

    at: float
    queue_s: float
    """How long a step waited before it ran."""
    block_s: float | None = None
    """Seconds of one decode step in one block; None before the first one."""


def after_step(load: Load | None, *, queue_s: float, block_s: float | None, now: float) -> Load:
    """After a reply. `block_s`: of a decode step; None for a prefill, whose tokens share the work."""
    if load is None or now - load.at > 3 * FADES_IN_S:
        return Load(now, queue_s, block_s)
    if block_s is not None and load.block_s is not None:
        block_s = _smoothed(load.block_s, block_s)
    return Load(now, _smoothed(load.queue_s, queue_s), load.block_s if block_s is None else block_s)


def after_word(load: Load | None, queue_s: float, now: float) -> Load:
    """After the server has said on a heartbeat how long its line is: fresher than any mean of the past."""
    return Load(now, queue_s) if load is None else replace(load, at=now, queue_s=queue_s)


def blended(measured_s: float, announced_s: float, age_s: float) -> float:
    """What to believe of a measurement of this age beside the announcement."""
    weight = math.exp(-max(age_s, 0.0) / FADES_IN_S)
    return weight * measured_s + (1 - weight) * announced_s


def _smoothed(old: float, new: float) -> float:
    return old + GAIN * (new - old)
