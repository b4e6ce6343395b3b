"""A toy span whose steps take time on the virtual clock, as long as its owner says at that moment.

pace = Pace(0.02)
await swarm.serve("a", "0:4", runner=PacedSpan(0, 4, pace), executor=pace.executor)
pace.step_s = 0.4     # throttled
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from corolla.apps.sim.toy import ToySpan
from corolla.clock import loop_time
from corolla.server.executor import Job
from corolla.server.runner import SessionCache
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something else than a step, in its place in the line."""

    turn: "asyncio.Future[None]"

    def take_turn(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class Pace:
    """How long a step takes on one server now, and the executor that takes so long."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.executor = PacedExecutor(self)


class PacedSpan(ToySpan):
    """A toy span for a `PacedExecutor`."""

    def __init__(self, start: int, end: int, pace: Pace) -> None:
        super().__init__(start, end)
        self._executor = pace.executor

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        self._executor.spend()
        return super().run(cache, step, want, wire_dtype)


class PacedExecutor:
    """One step after another, in the order in which they came. A step is computed when its time is over."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._line: deque[Job | _Call] = deque()
        self._is_running = False
        self._began_at: float | None = None
        """Of the step that is being computed, until it has spent its time."""

    def clock(self) -> float:
        return loop_time() if self._began_at is None else self._began_at

    def spend(self) -> None:
        """The time of the step that is computed is over."""
        self._began_at = None

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def queue_s(self) -> float:
        return len(self._line) * self._pace.step_s

    def submit(self, jobs: Sequence[Job]) -> None:
        self._line.extend(jobs)
        self._go_on()

    async def call(self, work: Callable[[], T], *, after: Hashable = None) -> T:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(_Call(turn))
        self._go_on()
        await turn
        return work()

    async def close(self) -> None:
        await self.call(lambda: None)

    def _go_on(self) -> None:
        while self._line and not self._is_running:
            first = self._line[0]
            if isinstance(first, _Call):
                self._line.popleft()
                first.take_turn()
            else:
                self._is_running = True
                asyncio.get_running_loop().call_later(self._pace.step_s, self._compute, first, loop_time())

    def _compute(self, job: Job, began_at: float) -> None:
        self._line.popleft()
        self._is_running, self._began_at = False, began_at
        job.run()
        self.spend()
        self._go_on()
