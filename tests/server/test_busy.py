"""A server that computes says so, even while it does so for the first time: only who has no work says 0."""

import asyncio
import threading
from types import SimpleNamespace

from corolla.server.executor import DeviceThread


def test_the_first_step_counts_while_it_runs() -> None:
    async def story() -> None:
        thread, gate, started = DeviceThread(), threading.Event(), threading.Event()

        def run() -> None:
            started.set()
            assert gate.wait(30)

        step = SimpleNamespace(
            session_key="one", guest_key="client", group_key="net", is_listed=False, num_tokens=1, is_prefill=False,
            run=run,
        )  # fmt: skip
        assert thread.queue_s == 0
        thread.submit([step])
        await asyncio.to_thread(started.wait, 30)
        await asyncio.sleep(0.05)
        assert thread.queue_s >= 0.05
        gate.set()
        await thread.close()
        assert thread.queue_s == 0

    asyncio.run(story())
