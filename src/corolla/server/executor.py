"""The device thread: the one place where a server computes, so that the event loop never blocks.

Work arrives in two ways. `submit` hands over the steps that one iteration of the event loop has read, as one
queue item; the thread adds whatever else has arrived, asks the scheduler which run now, and each step's result
leaves for the network from this thread (`hop.md`: a hand-over to the loop and back costs 0.1 ms a hop). `call`
runs anything else (building or dropping a cache) in the same order and is awaited.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from corolla.clock import loop_time
from corolla.server.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")


class Job(Protocol):
    """One step to run. `run` sends its own result and keeps its own errors: it must not raise."""

    @property
    def session_key(self) -> Hashable: ...

    @property
    def is_prefill(self) -> bool: ...

    def run(self) -> None: ...


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

    async def call(self, work: Callable[[], T]) -> T: ...

    async def close(self) -> None: ...


class DeviceThread:
    """Runs submitted jobs in scheduler order until closed."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Sequence[Job] | Callable[[], None] | None] = queue.SimpleQueue()
        self._submitted = 0
        self._finished = 0
        self._step_s = 0.0
        self._began: float | None = None
        """When the step that is being computed began."""
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

    def submit(self, jobs: Sequence[Job]) -> None:
        self._submitted += len(jobs)
        self._inbox.put(jobs)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the device thread, after what was submitted before; its result or its error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as failure:  # noqa: BLE001 - carried to the caller, who handles it
                loop.call_soon_threadsafe(_settle, done, None, failure)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self._inbox.put(run)
        return await done

    async def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        scheduler: Scheduler[Job] = Scheduler()
        while self._read_inbox(scheduler):
            for job in scheduler.take():
                self._run(job)
        self._run_all(scheduler)

    def _read_inbox(self, scheduler: Scheduler[Job]) -> bool:
        """Take all that has arrived, waiting only when there is nothing to run. False: time to end."""
        while True:
            try:
                entry = self._inbox.get(block=not scheduler)
            except queue.Empty:
                return True
            if entry is None:
                return False
            if callable(entry):
                self._run_all(scheduler)  # a call comes after what was submitted before it
                entry()
                continue
            for job in entry:
                scheduler.add(job)

    def _run_all(self, scheduler: Scheduler[Job]) -> None:
        while batch := scheduler.take():
            for job in batch:
                self._run(job)

    def _run(self, job: Job) -> None:
        started = self._began = time.perf_counter()
        try:
            job.run()
        except Exception:
            log.exception("a step left an error behind")
        self._began = None
        self._finished += 1
        self._step_s += 0.1 * (time.perf_counter() - started - self._step_s)


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
            self._scheduler.add(job)

    async def call(self, work: Callable[[], T]) -> T:
        while self._scheduler:
            self._run_jobs()
        return work()

    async def close(self) -> None:
        while self._scheduler:
            self._run_jobs()

    def _run_pass(self) -> None:
        self._run_jobs()
        if self._scheduler:
            asyncio.get_running_loop().call_soon(self._run_pass)

    def _run_jobs(self) -> None:
        for job in self._scheduler.take():
            job.run()


def _settle(done: "asyncio.Future[T]", result: T | None, failure: Exception | None) -> None:
    if done.done():  # the caller was cancelled meanwhile
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)  # pyright: ignore[reportArgumentType] - None only when T allows it
