"""What all sessions of one server may keep of what they pushed on, and who gives up what beyond that.

A journal and the last replies (`push.py`) lie in host memory: at most 256 MiB a session, far more than there is for
all that may be open. When the whole is over its bound, the clients of the address that holds most give first, of them
the one that holds most, and of its sessions those with a gap already, then the longest. They lose their history, and
what follows a lost server of theirs is fed from further back; one without a history loses what it could send again.
The newest step and reply of each are always kept. No I/O.
"""

from typing import Final, Protocol

from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.server.admission import Guest
from corolla.server.counts import add

SLACK: Final = 16
"""A part of so many of the bound is made free at once: then it is not to be done at the next step again."""


class Kept(Protocol):
    """What one session keeps: a `Push`, as it is seen here."""

    is_over: bool

    @property
    def nbytes(self) -> int: ...

    @property
    def has_history(self) -> bool: ...

    @property
    def has_gap(self) -> bool: ...

    @property
    def can_shed(self) -> bool:
        """There is more than the newest."""
        ...

    def shed(self) -> None: ...

    def reset(self) -> None: ...


class Journals:
    """One server's, the device thread's; any thread may read the numbers."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.total_bytes = 0
        self.num_shed = 0
        """Times that a session had to give something up."""
        self._held: dict[Kept, tuple[Guest, int]] = {}
        self._by_peer: dict[PeerId, int] = {}
        self._by_group: dict[AddressGroup | PeerId, int] = {}

    def saw(self, kept: Kept, guest: Guest) -> None:
        """This session may keep more than before, or less."""
        if kept.is_over:  # it ended while its step was computed, and is forgotten already
            return
        self._count(kept, guest, kept.nbytes)
        if self.total_bytes > self.max_bytes:
            self._make_room()

    def forget(self, kept: Kept) -> None:
        """It is over, and keeps nothing any more. `is_over` is set before: steps of it may still be in line."""
        kept.reset()
        if kept in self._held:
            guest, _ = self._held[kept]
            self._count(kept, guest, 0)
            del self._held[kept]

    def _count(self, kept: Kept, guest: Guest, nbytes: int) -> None:
        _, before = self._held.get(kept, (guest, 0))
        self._held[kept] = guest, nbytes
        self.total_bytes += nbytes - before
        add(self._by_peer, guest.peer, nbytes - before)
        add(self._by_group, _group_of(guest), nbytes - before)

    def _make_room(self) -> None:
        enough = self.max_bytes - self.max_bytes // SLACK
        while self.total_bytes > enough:
            victim = max((kept for kept in self._held if kept.can_shed), key=self._order, default=None)
            if victim is None:
                return
            victim.shed()
            self.num_shed += 1
            self._count(victim, self._held[victim][0], victim.nbytes)

    def _order(self, kept: Kept) -> tuple[int, int, bool, bool, int]:
        guest, nbytes = self._held[kept]
        of_group, of_peer = self._by_group.get(_group_of(guest), 0), self._by_peer.get(guest.peer, 0)
        return of_group, of_peer, kept.has_history, kept.has_gap, nbytes


def _group_of(guest: Guest) -> AddressGroup | PeerId:
    """As with the caps: a listed peer answers for itself alone."""
    return guest.peer if guest.group is None or guest.is_listed else guest.group
