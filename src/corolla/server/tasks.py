"""The background work of one server: started here, told of when it fails, over when the server is."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that nobody awaits one by one. Belongs to the loop it is used on."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, *, grace_s: float) -> None:
        """Let them end by themselves for this long; then they are cancelled."""
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in self._running:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a server task failed", exc_info=failure)
