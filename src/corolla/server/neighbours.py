"""Whom a session may send us to: only peers announced for this model, with a span that goes on where ours is left.

Without this, any client could have servers dial whomever it names.
"""

import asyncio

from corolla.clock import loop_time
from corolla.ids import PeerId
from corolla.swarm.watch import Watcher

MIN_REFRESH_S = 1.0
"""A client that names strangers makes us read the announcements once in this time, not once a stranger."""


class Neighbours:
    """The servers of our own model, as their announcements say; read when somebody unknown is named."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def may_dial(self, peer: PeerId, block: int) -> bool:
        """Whether `peer` is announced to host `block` of this model."""
        if self._is_announced(peer, block):
            return True
        asked_at = loop_time()
        async with self._reading:  # whoever asks meanwhile shares the answer
            if not self._is_announced(peer, block) and self._read_at < asked_at:
                await asyncio.sleep(max(0.0, self._read_at + MIN_REFRESH_S - loop_time()))
                self._read_at = loop_time()
                await self._watcher.refresh()
        return self._is_announced(peer, block)

    def _is_announced(self, peer: PeerId, block: int) -> bool:
        server = self._watcher.view.servers.get(peer)
        return server is not None and server.start <= block < server.end
