"""The background work of one server: started here, told of when it fails, over when the server is."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that nobody awaits one by one. Belongs to the loop it is used on."""

    def __init__(self) -> None:
        # Dicts for their order: in a simulation they are cancelled alike each time.
        self._running: dict[asyncio.Task[None], None] = {}
        self._watches: dict[asyncio.Task[None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, None], *, is_watch: bool = False) -> asyncio.Task[None]:
        """`is_watch`: it only looks on, as long as what it looks at lasts; nobody waits for it in the end."""
        task = asyncio.get_running_loop().create_task(work)
        (self._watches if is_watch else self._running)[task] = None
        task.add_done_callback(self._done)
        return task

    async def close(self, *, grace_s: float) -> None:
        """Let them end by themselves for this long; then they are cancelled. Watches are at once."""
        for task in list(self._watches):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in list(self._running):
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._watches.pop(task, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a server task failed", exc_info=failure)
