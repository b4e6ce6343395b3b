"""What all sessions of one client keep of what they pushed: bounded together, as each is by its own length.

A session's journal (`segments.py`) is what a lost first server is rebuilt from. Before a run a session claims room
for what it will push. Where that is too much in all, idle sessions give their journals up, the longest unused first:
they go on while their servers live, and say `SessionLost` when the first of them is lost. With nobody idle the run is
refused before anything is sent. No I/O.
"""

from typing import Protocol

from corolla.errors import Overloaded

GRAIN_BYTES = 64 << 10
"""Claims grow by so much: a decode step's own bytes are seldom worth a look at all sessions."""


class Holder(Protocol):
    """A session, as it is seen here."""

    @property
    def journal_bytes(self) -> int: ...

    @property
    def is_idle(self) -> bool:
        """No run and no move needs its journal now."""
        ...

    def give_up_journal(self) -> None: ...


class Journals:
    """One client's: who holds how much, the longest unused first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._claims: dict[Holder, int] = {}

    @property
    def claimed_bytes(self) -> int:
        return sum(self._claims.values())

    def claim(self, holder: Holder, more_bytes: int) -> None:
        """Room for so much more than it holds; it was used now. Raises Overloaded when there is none."""
        claimed = self._claims[holder] = self._claims.pop(holder, 0)
        needed = holder.journal_bytes + more_bytes
        if needed <= claimed:
            return
        claim = -(-needed // GRAIN_BYTES) * GRAIN_BYTES
        if self.claimed_bytes - claimed + claim > self.max_bytes:
            self._make_room(holder, claim - claimed)
        self._claims[holder] = claim

    def forget(self, holder: Holder) -> None:
        """It is closed. May be called twice."""
        self._claims.pop(holder, None)

    def _make_room(self, holder: Holder, more_bytes: int) -> None:
        idle = [other for other in self._claims if other is not holder and other.is_idle]
        for other in idle:
            self._claims[other] = other.journal_bytes  # trimmed meanwhile, perhaps
        busy_bytes = self.claimed_bytes - sum(self._claims[other] for other in idle)
        if busy_bytes + more_bytes > self.max_bytes:
            raise Overloaded(
                f"this client's running sessions would keep {busy_bytes + more_bytes} bytes of what they sent to "
                f"rebuild lost servers from, and may keep {self.max_bytes}: let some end, or raise max_journal_bytes",
                value=str(busy_bytes + more_bytes), bound=str(self.max_bytes),
            )  # fmt: skip
        for other in idle:
            if self.claimed_bytes + more_bytes <= self.max_bytes:
                return
            if self._claims[other] > 0:
                other.give_up_journal()
                self._claims[other] = 0
