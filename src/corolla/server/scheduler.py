"""Which waiting steps run together in the next pass of the device thread. Pure: no clock of its own, no threads.

While one client is there, every pass takes the next step of every session that waits with a single position
(decode), and one step of many (a prefill or replay chunk), the oldest: a long prompt delays others by one chunk at
most, and nobody starves. A session's own steps keep their order, whatever their size. Nothing is ever held back to
fill a batch: waiting for company measured only as latency.

Between clients, who asks for little comes first (`fairness.py`): each light client has one step in every pass, and of
the heavy ones one of them has one, while it may. A listed client has the next step of each of its sessions, unless it
is heavy and another listed one is not. So a client that floods takes a quarter of the time from others who
are at work, and all of it when nobody is.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from corolla.server.fairness import LIGHT_TOKENS, Fairness

ALWAYS: Final = float("inf")
"""As `now`: everything that waits may run."""


class Schedulable(Protocol):
    @property
    def session_key(self) -> Hashable:
        """Steps of one session run in the order in which they came."""
        ...

    @property
    def guest_key(self) -> Hashable:
        """Whose session it is."""
        ...

    @property
    def group_key(self) -> Hashable:
        """Where that client comes from."""
        ...

    @property
    def is_listed(self) -> bool:
        """Of a client that is never heavy to strangers."""
        ...

    @property
    def num_tokens(self) -> int:
        """Positions × rows."""
        ...

    @property
    def is_prefill(self) -> bool: ...


Item = TypeVar("Item", bound=Schedulable)


class Scheduler(Generic[Item]):
    """Steps in line; `take` says what runs now. Times in seconds, of any one clock."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[tuple[int, Item]]] = {}
        """Session → its steps with their numbers of arrival."""
        self._sole: tuple[Item, float] | None = None
        """A step of few positions that came, then, while nothing waited: stands in no line until another comes."""
        self._arrived = 0
        self._length = 0
        self._fairness = Fairness()
        self._heavy: Item | None = None
        """Of the last pass."""

    def __len__(self) -> int:
        return self._length

    def head_of(self, session_key: Hashable) -> Item | None:
        """The next step of this session, if one waits."""
        self._line_up_sole()
        line = self._lines.get(session_key)
        return None if line is None else line[0][1]

    def add(self, item: Item, now: float) -> None:
        self._length += 1
        if self._length == 1 and item.num_tokens <= LIGHT_TOKENS:
            self._sole = item, now
        else:
            self._line_up_sole()
            self._line_up(item, now)

    def _line_up(self, item: Item, now: float) -> None:
        self._lines.setdefault(item.session_key, deque()).append((self._arrived, item))
        self._arrived += 1
        self._fairness.came(item, now)

    def _line_up_sole(self) -> None:
        if self._sole is not None:
            item, came_at = self._sole
            self._sole = None
            self._line_up(item, came_at)

    def take(self, now: float) -> list[Item]:
        """The next pass. Empty: nothing waits, or only what has to wait for `pause_s`."""
        if self._sole is not None:  # light and alone, it runs now whoever else is here: 20 calls less a hop
            item, came_at = self._sole
            self._sole, self._heavy, self._length = None, None, 0
            self._fairness.came_alone(item, came_at)
            return [item]
        entries = [line[0] for line in self._lines.values()]
        if len(entries) > 1:
            entries.sort(key=_arrival)
        heads = [item for _, item in entries]
        self._heavy = None
        is_shared = now < ALWAYS and self._fairness.is_shared(now)
        batch = self._shared_pass(heads, now) if is_shared else _whole_pass(heads)
        for item in batch:
            self._take_head(item)
        return batch

    def pause_s(self, now: float) -> float:
        """How long what waits has to, when a pass is empty."""
        return self._fairness.pause_s(now)

    def ran(self, item: Item, seconds: float, now: float) -> None:
        """A step of the last pass took so long, until `now`."""
        if item is self._heavy:
            self._fairness.ran_heavy(seconds, now)

    def _shared_pass(self, heads: Sequence[Item], now: float) -> list[Item]:
        heavy = [item for item in heads if self._fairness.is_heavy(item)]
        light = [item for item in heads if not self._fairness.is_heavy(item)]
        if listed := [item for item in light if item.is_listed]:
            floods = self._fairness.heavy_among(listed, now)
            heavy += [item for item in listed if item.guest_key in floods]
            listed = _whole_pass([item for item in listed if item.guest_key not in floods])
        firsts: dict[Hashable, Item] = {}
        for item in light:
            if not item.is_listed:
                firsts.setdefault(item.guest_key, item)
        batch = [*firsts.values(), *listed]
        if heavy and self._fairness.may_run_heavy(now):
            self._heavy = self._fairness.whose_turn(heavy)
            batch.append(self._heavy)
        return batch

    def _take_head(self, item: Item) -> None:
        line = self._lines[item.session_key]
        line.popleft()
        self._length -= 1
        self._fairness.left(item)
        if not line:
            del self._lines[item.session_key]


def _arrival(entry: tuple[int, object]) -> int:
    return entry[0]


def _whole_pass(heads: Sequence[Item]) -> list[Item]:
    """Each waiting session's next decode step, then the oldest prefill."""
    decodes = [item for item in heads if not item.is_prefill]
    prefills = [item for item in heads if item.is_prefill]
    return decodes + prefills[:1]
