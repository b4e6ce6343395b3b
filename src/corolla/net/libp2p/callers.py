"""From where the DHT's callers come, and how much of our time they may take.

hivemind tells a handler who calls, the daemon knows over which address. The source of the call that a task answers
stands in a context variable: what hivemind does for that call, storing above all, happens in the same task.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, Final

from corolla.clock import loop_time
from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import AddressGroup
from corolla.net.libp2p.control import Control
from corolla.net.libp2p.kept import Source
from corolla.net.libp2p.sealed import CallRefused
from corolla.net.places import UNKNOWN

FRESH_S: Final = 60.0
"""A peer that moves to another address within a minute is counted where it was."""
ASK_PAUSE_S: Final = 0.2
"""Between two questions to the daemon, however many unknown peers call: a call waits that long at most."""

WORK: Final = Rate(per_s=0.25, burst=2.0)
"""Seconds of our loop that the calls of one address group may take, in the long run and at once. One message of 4 MiB
can hold so many signatures to check that a server's heartbeats would stop for as long."""
_RECORD_S: Final = 0.0002
"""Of checking a record's signature and storing it (measured: 0.12 to 0.21 ms)."""
_LOOKUP_S: Final = 0.0003
_WHOLE_DICTIONARY: Final = b""
"""hivemind's subkey for many records at once; how many shows only after they are decoded."""
_LEAST_RECORD_BYTES: Final = 96

_source: ContextVar[Source | None] = ContextVar("corolla_dht_caller", default=None)


class Callers:
    """The sources of recent callers."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._groups: dict[PeerId, AddressGroup] = {}
        self._work = Buckets(WORK)
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def admit(self, peer: PeerId, request: Any) -> None:
        """From here on, this task works for that peer. Raises CallRefused when its network takes too much."""
        group = await self._group(peer)
        if not self._work.take(group, loop_time(), work_s(request)):
            raise CallRefused("too many calls come from this network")
        _source.set(Source(peer, group))

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


def work_s(request: Any) -> float:
    """About how long one of the DHT's requests keeps us busy; by the size of what it carries, not by what it claims."""
    values = list(getattr(request, "values", ()))
    if not values:
        return _LOOKUP_S * (1 + len(getattr(request, "keys", ())))
    wholes = [value for tag, value in zip(request.subkeys, values, strict=False) if tag == _WHOLE_DICTIONARY]
    num_records = len(values) + sum(len(value) for value in wholes) // _LEAST_RECORD_BYTES
    return _LOOKUP_S + _RECORD_S * num_records
