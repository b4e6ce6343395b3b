"""A server's background tasks end in the order in which they began: a simulation of the same seed is the same then."""

import asyncio

import pytest

from corolla.net.memory.loop import run_virtual
from corolla.server.tasks import Tasks


@pytest.mark.parametrize("is_watch", [False, True])
def test_tasks_are_cancelled_in_the_order_in_which_they_began(*, is_watch: bool) -> None:
    cancelled: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def story() -> None:
        tasks, order = Tasks(), list(range(50))
        waste = [bytearray(number * 37 % 900) for number in order]  # tasks lie here and there in memory
        running = [tasks.spawn(work(number), is_watch=is_watch) for number in order if waste]
        await asyncio.sleep(0)
        await tasks.close(grace_s=0)
        await asyncio.gather(*running, return_exceptions=True)
        assert cancelled == order

    run_virtual(story())
