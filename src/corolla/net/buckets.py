"""Rates, held by token buckets: a burst passes, a flood does not. Pure: `now` is an argument, in seconds."""

from dataclasses import dataclass, field
from typing import Final

from corolla.errors import BadInput

MAX_BUCKETS: Final = 10_000
"""Names whose rate is remembered. One that has been quiet for a while is forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many in a burst, so many a second in the long run."""

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (self.per_s > 0 and self.burst >= 1):
            raise BadInput(f"a rate needs more than 0 a second and a burst of at least 1, not {self}")


@dataclass(slots=True)
class Buckets:
    """A token bucket for each name."""

    rate: Rate
    limit: int = MAX_BUCKETS
    _spent: dict[str, tuple[float, float]] = field(default_factory=lambda: dict[str, tuple[float, float]]())
    """Tokens missing in the bucket, and when that was so. A full bucket needs no entry."""

    def take(self, name: str, now: float, amount: float = 1.0) -> bool:
        """False: it has had as many as the rate allows."""
        missing = self._missing(name, now)
        if missing + amount > self.rate.burst or (name not in self._spent and not self._has_room(now)):
            return False
        self._spent[name] = (missing + amount, now)
        return True

    def wait_s(self, name: str, now: float, amount: float = 1.0) -> float:
        """Seconds until it may take so many."""
        return max(0.0, self._missing(name, now) + amount - self.rate.burst) / self.rate.per_s

    def _missing(self, name: str, now: float) -> float:
        missing, at = self._spent.get(name, (0.0, now))
        return max(0.0, missing - max(0.0, now - at) * self.rate.per_s)  # a wall clock may jump back

    def _has_room(self, now: float) -> bool:
        if len(self._spent) >= self.limit:
            self._spent = {name: spent for name, spent in self._spent.items() if self._missing(name, now) > 0}
        return len(self._spent) < self.limit
