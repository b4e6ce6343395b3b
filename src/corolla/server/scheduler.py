"""Which waiting steps run together in the next pass of the device thread. Pure: no clock, no threads.

Every pass takes the next step of every session that waits with a single position (decode), and one step of many
(a prefill or replay chunk), the oldest: a long prompt delays others by one chunk at most, and nobody starves. A
session's own steps keep their order, whatever their size. Nothing is ever held back to fill a batch: waiting for
company measured only as latency.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    @property
    def session_key(self) -> Hashable:
        """Steps of one session run in the order in which they came."""
        ...

    @property
    def is_prefill(self) -> bool: ...


Item = TypeVar("Item", bound=Schedulable)


class Scheduler(Generic[Item]):
    """Steps in line; `take` says what runs now."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[tuple[int, Item]]] = {}
        """Session → its steps with their numbers of arrival."""
        self._arrived = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, item: Item) -> None:
        self._lines.setdefault(item.session_key, deque()).append((self._arrived, item))
        self._arrived += 1
        self._length += 1

    def take(self) -> list[Item]:
        """The next pass: each waiting session's next decode step, then the oldest prefill. Empty: nothing waits."""
        heads = sorted((line[0] for line in self._lines.values()), key=lambda entry: entry[0])
        decodes = [item for _, item in heads if not item.is_prefill]
        prefills = [item for _, item in heads if item.is_prefill]
        batch = decodes + prefills[:1]
        for item in batch:
            self._take_head(item.session_key)
        return batch

    def _take_head(self, key: Hashable) -> None:
        line = self._lines[key]
        line.popleft()
        self._length -= 1
        if not line:
            del self._lines[key]
