"""From where the DHT's callers come: hivemind tells a handler who calls, the daemon knows over which address.

The source of the call that a task answers stands in a context variable: what hivemind does for that call, storing
above all, happens in the same task.
"""

import asyncio
from contextvars import ContextVar
from typing import Final

from corolla.clock import loop_time
from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.libp2p.control import Control
from corolla.net.libp2p.kept import Source
from corolla.net.places import UNKNOWN

FRESH_S: Final = 60.0
"""A peer that moves to another address within a minute is counted where it was."""
ASK_PAUSE_S: Final = 0.2
"""Between two questions to the daemon, however many unknown peers call: a call waits that long at most."""

_source: ContextVar[Source | None] = ContextVar("corolla_dht_caller", default=None)


class Callers:
    """The sources of recent callers."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._groups: dict[PeerId, AddressGroup] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def note(self, peer: PeerId) -> None:
        """From here on, this task works for that peer."""
        _source.set(Source(peer, await self._group(peer)))

    @staticmethod
    def current() -> Source | None:
        """For whom this task works; None: for ourselves."""
        return _source.get()

    async def _group(self, peer: PeerId) -> AddressGroup:
        if loop_time() - self._asked_at > FRESH_S or peer not in self._groups:
            async with self._asking:
                await self._ask_about(peer)
        return self._groups.get(peer, UNKNOWN)

    async def _ask_about(self, peer: PeerId) -> None:
        """Another caller's question may have brought the answer while we waited for our turn."""
        since_s = loop_time() - self._asked_at
        if peer in self._groups and since_s <= FRESH_S:
            return
        await asyncio.sleep(max(0.0, ASK_PAUSE_S - since_s))
        try:
            self._groups = await self._control.connected_groups()
        except SwarmError:
            self._groups = {}
        self._asked_at = loop_time()
