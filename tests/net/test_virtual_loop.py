"""Virtual time passes at once, hangs become errors, leftovers are found."""

import asyncio
import threading
import time

import pytest

from corolla.net.memory.loop import CallbackFailed, Deadlock, LeakedTasks, TimeLimit, run_virtual


def test_ten_minutes_of_heartbeats_pass_in_well_under_a_second() -> None:
    async def beat_for_ten_minutes() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        beats = 0
        while loop.time() < 600:
            await asyncio.sleep(0.5)
            beats += 1
        return beats, loop.time()

    before = time.monotonic()
    assert run_virtual(beat_for_ten_minutes()) == (1200, 600.0)
    assert time.monotonic() - before < 60  # of the clock on the wall; a busy machine takes its time


def test_a_timeout_obeys_virtual_time() -> None:
    async def wait_too_long() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(1000)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait_too_long()) == pytest.approx(30)


def test_timers_fire_in_order_of_their_time() -> None:
    async def sleep_in_any_order() -> list[float]:
        woken: list[float] = []

        async def sleeper(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            woken.append(delay_s)

        async with asyncio.TaskGroup() as group:
            for delay_s in (5.0, 0.1, 3000.0, 7.25):
                group.create_task(sleeper(delay_s))
        return woken

    assert run_virtual(sleep_in_any_order()) == [0.1, 5.0, 7.25, 3000.0]


def test_a_deadlock_is_an_error_that_says_who_waits() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_nobody"):
        run_virtual(wait_for_nobody())


def test_a_hang_beside_a_periodic_task_ends_at_the_time_limit() -> None:
    async def wait_beside_a_heartbeat() -> None:
        async def beat() -> None:
            for _ in range(1_000_000):
                await asyncio.sleep(2)

        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            await asyncio.Event().wait()

    with pytest.raises(TimeLimit, match="100 virtual seconds"):
        run_virtual(wait_beside_a_heartbeat(), limit_s=100)


def test_a_task_left_running_fails_the_run_and_is_cancelled() -> None:
    cancelled: list[str] = []

    async def forget_a_task() -> None:
        async def forgotten() -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append("forgotten")
                raise

        task = asyncio.create_task(forgotten())
        await asyncio.sleep(0)
        assert not task.done()

    with pytest.raises(LeakedTasks, match="forgotten"):
        run_virtual(forget_a_task())
    assert cancelled == ["forgotten"]


def test_a_task_that_is_being_cancelled_is_no_leak() -> None:
    async def cancel_without_waiting() -> str:
        task = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        task.cancel()
        return "done"

    assert run_virtual(cancel_without_waiting()) == "done"


def test_a_raising_callback_fails_the_run() -> None:
    async def schedule_a_failure() -> None:
        asyncio.get_running_loop().call_soon(lambda: {}["missing"])
        await asyncio.sleep(1)

    with pytest.raises(CallbackFailed, match="missing"):
        run_virtual(schedule_a_failure())


def test_the_error_of_the_main_task_comes_through() -> None:
    async def fail() -> None:
        await asyncio.sleep(3)
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        run_virtual(fail())


def test_another_thread_can_wake_an_idle_loop() -> None:
    async def wait_for_a_thread() -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        thread = threading.Timer(0.05, lambda: loop.call_soon_threadsafe(answer.set_result, "woken"))
        thread.start()
        try:
            return await answer
        finally:
            thread.join()

    assert run_virtual(wait_for_a_thread()) == "woken"
