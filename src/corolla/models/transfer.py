"""How far a download is, for people: bytes, seconds, and what it waits for."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from corolla.errors import SwarmError

_TELL_AFTER_S: Final = 2.0
_TELL_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A download under way. `waiting` says for what, when nothing comes; empty otherwise."""

    what: str
    done_bytes: int
    total_bytes: int
    seconds: float
    waiting: str = ""

    @property
    def is_done(self) -> bool:
        return self.done_bytes >= self.total_bytes and not self.waiting

    @property
    def left_s(self) -> float | None:
        """Seconds to go at the pace so far; None before there is one."""
        if not self.done_bytes or self.seconds <= 0:
            return None
        return (self.total_bytes - self.done_bytes) * self.seconds / self.done_bytes

    def __str__(self) -> str:
        words = f"{self.what}: {megabytes(self.done_bytes)} of {megabytes(self.total_bytes)} MB, {self.seconds:.0f} s"
        if not self.total_bytes:  # the hub was not heard yet
            words = f"{self.what}: {self.seconds:.0f} s"
        if self.waiting:
            return f"{words}, waiting: {self.waiting}"
        if self.is_done or self.left_s is None:
            return words
        return f"{words}, about {self.left_s:.0f} s left"


Progress = Callable[[Transfer], None]
"""Is told a few times a second how far it is. What it raises ends the download; what has come stays in the cache."""


@dataclass(frozen=True, slots=True)
class WhileWanted:
    """Passes progress on until nobody wants the download any more: then it ends it."""

    progress: Progress
    is_left: threading.Event

    def __call__(self, transfer: Transfer) -> None:
        if self.is_left.is_set():
            raise SwarmError("left before the download was done; what has come stays")
        self.progress(transfer)


@dataclass(slots=True)
class TellSometimes:
    """Says in a line now and then how far it is, when it takes long enough for somebody to wonder; and its end."""

    say: Callable[[str], object]
    _told_at: float = field(default=float("-inf"), init=False)

    def __call__(self, transfer: Transfer) -> None:
        now = time.monotonic()
        is_due = transfer.is_done or now - self._told_at > _TELL_EVERY_S
        if transfer.seconds > _TELL_AFTER_S and is_due:
            self._told_at = now
            self.say(str(transfer))


def show_nothing(_transfer: Transfer) -> None:
    """For callers that show no progress."""


def megabytes(num_bytes: int) -> str:
    """`1.5` or `1,500`: as exact as a person wants it."""
    return f"{num_bytes / 1e6:,.1f}" if num_bytes < 100e6 else f"{num_bytes / 1e6:,.0f}"
