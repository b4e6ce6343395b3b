"""An event loop whose time is virtual: where a real loop would wait for a timer, this one jumps to it.

`asyncio.sleep`, `asyncio.timeout` and `loop.time()` obey it, so ten minutes of heartbeats pass in the time their
callbacks take. When nothing is ready and no timer is set, a real loop would hang; this one raises `Deadlock` and
says where each task waits. `run_virtual` is its `asyncio.run`, and fails when tasks are left running.

Real threads: `call_soon_threadsafe` wakes the loop as always, but virtual time does not wait for a thread as long
as any timer is set. What runs here should use no threads (and so no `run_in_executor`).
"""

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

THREAD_GRACE_S = 1.0
"""Real seconds that another thread gets to wake a loop that has nothing to do, before that is a deadlock."""

SETTLE_ROUNDS = 20
"""Passes of the loop, no time, that tasks get to end after the main one has: a cancelled task needs some."""

DAY_S = 86_400.0


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for another."""


class TimeLimit(RuntimeError):
    """The run took more virtual time than allowed: most often a task that waits for ever beside a periodic one."""


class LeakedTasks(AssertionError):
    """The main task ended and others were still running."""


class CallbackFailed(AssertionError):
    """A callback raised, or a task failed and nobody looked."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls real file descriptors (the loop's own wake-up pipe); instead of waiting it moves `now` on.

    Where there is no file but that pipe, nothing is polled as long as callbacks are ready (whoever writes to the pipe
    has made one ready before) or this is the only thread (nobody else would write). That saves a call to the system in
    most passes of the loop.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit_s = limit_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        nobody_writes = timeout == 0 or (timeout is not None and threading.active_count() == 1)
        events = [] if nobody_writes and len(self.get_map()) == 1 else super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            return self._wait_for_threads()
        self.now += timeout
        if self.now > self._limit_s:
            raise TimeLimit(f"more than {self._limit_s:g} virtual seconds; waiting: {_where_tasks_wait()}")
        return events

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is ready and no timer is set: only another thread can help now."""
        events = super().select(THREAD_GRACE_S) if threading.active_count() > 1 else []
        if not events:
            raise Deadlock(f"nothing to run and no timer set; waiting: {_where_tasks_wait()}")
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector event loop on virtual time, which starts at 0.

    It refuses to pass `limit_s` (`TimeLimit`): a hang beside a periodic task would spin for ever.
    """

    def __init__(self, limit_s: float = DAY_S) -> None:
        self._jumping = _JumpingSelector(limit_s)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, Result], *, limit_s: float = DAY_S) -> Result:
    """Run `main` on a fresh virtual loop and return its result.

    Like `asyncio.run` it cancels what is left over; but leftovers are then an error (`LeakedTasks`), and so is an
    exception that a callback raised or a forgotten task kept (`CallbackFailed`). An exception of `main` goes first.
    """
    failures: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        result, leaked = runner.run(_run_and_settle(main))
    if failures:
        raise CallbackFailed(_describe(failures)) from failures[0].get("exception")
    if leaked:
        raise LeakedTasks(f"still running at the end: {'; '.join(leaked)}")
    return result


async def _run_and_settle(main: Coroutine[Any, Any, Result]) -> tuple[Result, list[str]]:
    """The result of `main`, and the tasks that are still running a few passes later."""
    result = await main
    for _ in range(SETTLE_ROUNDS):
        if not _others():
            break
        await asyncio.sleep(0)
    return result, [_where(task) for task in _others()]


def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _where_tasks_wait() -> str:
    """Each pending task of the loop that runs in this thread. Called inside the loop, where no task is current."""
    return "; ".join(sorted(_where(task) for task in asyncio.all_tasks(asyncio.get_running_loop())))


def _where(task: asyncio.Task[Any]) -> str:
    """The task's name, then the coroutines it waits in, outermost first, and the line of the last."""
    names: list[str] = []
    place = "its start"
    coroutine: Any = task.get_coro()
    while frame := getattr(coroutine, "cr_frame", None):
        names.append(coroutine.__qualname__)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return f"{task.get_name()} ({' > '.join(names)}) at {place}"


def _describe(failures: list[dict[str, Any]]) -> str:
    return "; ".join(f"{failure.get('message')}: {failure.get('exception')!r}" for failure in failures)
