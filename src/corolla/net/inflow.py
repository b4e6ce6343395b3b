"""How fast a link brings large messages, seen by whoever reads them: nothing is sent to find it out. Pure.

A large message (a prompt's chunk, a replay) is written at once, so how long its bytes take to come is the link's doing.
The first of them say nothing: they come out of buffers, or while TCP still tries how fast it may send.
"""

from typing import Final

SKIPPED_BYTES: Final = 128 << 10
LEAST_BYTES: Final = 128 << 10
"""Beyond those skipped; a message with fewer tells nothing."""
LEAST_S: Final = 0.005
"""What came faster came out of a buffer, or over a link whose speed costs no step anything: counted as this."""


class InflowMeter:
    """One stream's. Told of every read, it now and then knows a speed."""

    __slots__ = ("_began", "_last")

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None
        """Bytes of the message under way that had come when counting began, and when."""
        self._last: tuple[int, float] = 0, 0.0

    def saw(self, num_bytes: int, now: float) -> float | None:
        """So many bytes of the message under way have come. Bytes a second, when a large one has just ended."""
        sample = None
        if num_bytes < self._last[0]:  # it ended, and perhaps another has begun
            sample, self._began = self._measured(), None
        if num_bytes and self._began is None and num_bytes >= SKIPPED_BYTES:
            self._began = num_bytes, now
        self._last = num_bytes, now
        return sample

    def interrupt(self) -> None:
        """We read no further for a while: what comes then says nothing of the link."""
        self._began, self._last = None, (0, 0.0)

    def _measured(self) -> float | None:
        if self._began is None:
            return None
        num_bytes, seconds = self._last[0] - self._began[0], self._last[1] - self._began[1]
        return num_bytes / max(seconds, LEAST_S) if num_bytes >= LEAST_BYTES else None
