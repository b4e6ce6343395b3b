"""The device thread: the one place where a server computes, so that the event loop never blocks.

Work arrives in two ways. `submit` hands over the steps that one iteration of the event loop has read, as one
queue item; the thread adds whatever else has arrived, asks the scheduler which run now, and each step's result
leaves for the network from this thread (`hop.md`: a hand-over to the loop and back costs 0.1 ms a hop). `call`
runs anything else (building or dropping a cache) behind the steps of its session, and is awaited.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from corolla.clock import loop_time
from corolla.server.scheduler import ALWAYS, Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")

QUIET_S: Final = 1.0
"""Without a step: longer than a client of a slow network waits for its token."""
LONGEST_WAIT_S: Final = 60.0
LOOK_S: Final = 0.25
CLOSE_S: Final = 30.0
"""For the step that runs when a server ends."""


class Job(Protocol):
    """One step to run. `run` sends its own result and keeps its own errors: it must not raise."""

    @property
    def session_key(self) -> Hashable: ...

    @property
    def guest_key(self) -> Hashable: ...

    @property
    def group_key(self) -> Hashable: ...

    @property
    def is_listed(self) -> bool: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_prefill(self) -> bool: ...

    def run(self) -> None: ...


@dataclass(slots=True)
class _Call:
    """Work that comes after the steps of one session that wait; it takes their place in line."""

    run: Callable[[], None]
    session_key: Hashable
    guest_key: Hashable
    group_key: Hashable
    is_listed: bool
    num_tokens: int = 0
    is_prefill: bool = False

    @classmethod
    def behind(cls, step: "Job | _Call", run: Callable[[], None]) -> "_Call":
        return cls(run, step.session_key, step.guest_key, step.group_key, step.is_listed)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call on its way to the device thread."""

    after: Hashable
    run: Callable[[], None]


class Executor(Protocol):
    """Where steps are computed: the device thread, or (tests on a virtual clock) the loop itself."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, by which steps are timed."""
        ...

    @property
    def waiting(self) -> int:
        """Jobs submitted and not finished."""
        ...

    @property
    def queue_s(self) -> float:
        """How long a step that arrives now would wait, in seconds."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these soon. The caller bounds `waiting`."""
        ...

    async def call(self, work: Callable[[], T], *, after: Hashable = None) -> T:
        """Run `work` where steps run; its result or its error.

        `after`: the key of a session, whose submitted steps come first; None: all submitted steps come first.
        """
        ...

    async def close(self) -> None: ...


class DeviceThread:
    """Runs submitted jobs in scheduler order until closed."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Sequence[Job] | _Asked | None] = queue.SimpleQueue()
        self._scheduler: Scheduler[Job | _Call] = Scheduler()
        """The device thread's."""
        self._submitted = 0
        self._finished = 0
        self._step_s = 0.0
        self._began: float | None = None
        """When the step that is being computed began."""
        self._done = self.clock()
        """When the last one ended."""
        self._thread = threading.Thread(target=self._work, name="corolla-device", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs submitted and not finished. Each counter has one writer: the loop and the device thread."""
        return self._submitted - self._finished

    @property
    def queue_s(self) -> float:
        """A long step counts while it runs: to a client that waits for it, 0 says that there is no work here."""
        began = self._began
        running_s = 0.0 if began is None else self.clock() - began
        return max(self.waiting * self._step_s, running_s)

    @property
    def quiet_s(self) -> float:
        """For how long there has been no step; 0 while there is one."""
        return 0.0 if self.waiting else self.clock() - self._done

    def submit(self, jobs: Sequence[Job]) -> None:
        self._submitted += len(jobs)
        self._inbox.put(jobs)

    async def call(self, work: Callable[[], T], *, after: Hashable = None) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as failure:  # noqa: BLE001 - carried to the caller, who handles it
                loop.call_soon_threadsafe(_settle, done, None, failure)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self._inbox.put(_Asked(after, run))
        return await done

    async def close(self) -> None:
        """Finish what was submitted, then end the thread. A device that hangs keeps nobody from leaving."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            log.warning("the device thread is still at work after %g s: it ends with the process", CLOSE_S)

    def _work(self) -> None:
        pause_s: float | None = None
        while self._read_inbox(pause_s):
            batch = self._scheduler.take(self.clock())
            for job in batch:
                self._run(job)
            pause_s = 0.0 if batch else self._scheduler.pause_s(self.clock())
            if not self._scheduler:
                pause_s = None
        self._run_all()

    def _read_inbox(self, pause_s: float | None) -> bool:
        """Take all that has arrived; if nothing has, wait so long for it (None: for ever). False: time to end."""
        while True:
            try:
                entry = self._inbox.get_nowait() if pause_s == 0.0 else self._inbox.get(timeout=pause_s)
            except queue.Empty:
                return True
            pause_s = 0.0
            if entry is None:
                return False
            if isinstance(entry, _Asked):
                self._call(entry.after, entry.run)
            else:
                for job in entry:
                    self._scheduler.add(job, self.clock())

    def _call(self, after: Hashable, run: Callable[[], None]) -> None:
        if after is None:
            self._run_all()
        elif (head := self._scheduler.head_of(after)) is not None:
            self._scheduler.add(_Call.behind(head, run), self.clock())
            return
        run()

    def _run_all(self) -> None:
        while batch := self._scheduler.take(ALWAYS):
            for job in batch:
                self._run(job)

    def _run(self, job: Job | _Call) -> None:
        started = self._began = self.clock()
        try:
            job.run()
        except Exception:
            log.exception("a step left an error behind")
        done = self._done = self.clock()
        self._began = None
        self._scheduler.ran(job, done - started, done)
        if not isinstance(job, _Call):
            self._finished += 1
            self._step_s += 0.1 * (done - started - self._step_s)


async def until_quiet(device: DeviceThread) -> None:
    """Wait for a pause in which something long keeps nobody waiting; where none comes, for `LONGEST_WAIT_S`."""
    deadline = loop_time() + LONGEST_WAIT_S
    while device.quiet_s < QUIET_S and loop_time() < deadline:  # noqa: ASYNC110 - the device thread sets no event
        await asyncio.sleep(LOOK_S)


class InlineExecutor:
    """Computes on the event loop, pass by pass: for the in-memory swarm, whose clock is virtual."""

    clock = staticmethod(loop_time)
    queue_s = 0.0

    def __init__(self) -> None:
        self._scheduler: Scheduler[Job] = Scheduler()

    @property
    def waiting(self) -> int:
        return len(self._scheduler)

    def submit(self, jobs: Sequence[Job]) -> None:
        if not self._scheduler:
            asyncio.get_running_loop().call_soon(self._run_pass)
        for job in jobs:
            self._scheduler.add(job, self.clock())

    async def call(self, work: Callable[[], T], *, after: Hashable = None) -> T:
        while self._scheduler if after is None else self._scheduler.head_of(after) is not None:
            self._run_jobs(ALWAYS)
        return work()

    async def close(self) -> None:
        while self._scheduler:
            self._run_jobs(ALWAYS)

    def _run_pass(self) -> None:
        loop = asyncio.get_running_loop()
        if self._run_jobs(self.clock()):
            again = partial(loop.call_soon, self._run_pass)
        else:
            again = partial(loop.call_later, self._scheduler.pause_s(self.clock()), self._run_pass)
        if self._scheduler:
            again()

    def _run_jobs(self, now: float) -> bool:
        batch = self._scheduler.take(now)
        for job in batch:
            started = self.clock()
            job.run()
            self._scheduler.ran(job, self.clock() - started, self.clock())
        return bool(batch)


def _settle(done: "asyncio.Future[T]", result: T | None, failure: Exception | None) -> None:
    if done.done():  # the caller was cancelled meanwhile
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)  # pyright: ignore[reportArgumentType] - None only when T allows it
