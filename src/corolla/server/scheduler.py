"""Which waiting steps run together in the next pass of the device thread. Pure: no clock, no threads.

Every pass takes all decode steps that wait and at most one prefill chunk, in the order they came: a long
prompt delays others by one chunk at most, and nobody starves. Nothing is ever held back to fill a batch:
waiting for company measured only as latency.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    @property
    def is_prefill(self) -> bool: ...


Item = TypeVar("Item", bound=Schedulable)


class Scheduler(Generic[Item]):
    """Steps in line; `take` says what runs now."""

    def __init__(self) -> None:
        self._decodes: deque[Item] = deque()
        self._prefills: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def add(self, item: Item) -> None:
        (self._prefills if item.is_prefill else self._decodes).append(item)

    def take(self) -> list[Item]:
        """The next pass: every waiting decode step, then the oldest prefill chunk. Empty when nothing waits."""
        batch = list(self._decodes)
        self._decodes.clear()
        if self._prefills:
            batch.append(self._prefills.popleft())
        return batch
