"""Keeps a server announced: a signed record of what it serves, renewed while it lives, taken back when it leaves."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from corolla.net.streams import Transport
from corolla.swarm.announcement import MODELS_KEY, Announcement, ModelEntry, announcement_key

log = logging.getLogger(__name__)


class Announcer:
    """Publishes what `describe` says, now, periodically and when told that it changed."""

    def __init__(
        self,
        transport: Transport,
        describe: Callable[[], Announcement],
        *,
        period_s: float,
        lifetime_s: float,
    ) -> None:
        self._transport = transport
        self._describe = describe
        self._period_s = period_s
        self._lifetime_s = lifetime_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """What `describe` says is new: do not wait for the period."""
        self._changed.set()

    async def announce(self) -> bool:
        """Publish once. False: no other peer keeps the record."""
        said = self._describe()
        entry = ModelEntry(name=said.model_name, fingerprint=said.fingerprint, num_blocks=said.num_blocks)
        records = self._transport.records
        kept = await records.put(announcement_key(said.fingerprint), said.encode(), self._lifetime_s)
        return await records.put(MODELS_KEY, entry.encode(), self._lifetime_s) and kept

    async def keep_announced(self) -> None:
        """Renew the record until cancelled."""
        while True:
            self._changed.clear()
            if not await self.announce():
                log.warning("no other peer keeps this server's announcement; it is repeated", extra={})
            try:
                async with asyncio.timeout(self._period_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def withdraw(self) -> None:
        """Take the announcement back: clients stop choosing this server, and nobody lists it any more.

        The last record outlives the one before it: peers keep whichever expires later.
        """
        said = msgspec.structs.replace(self._describe(), state="left")
        await self._transport.records.put(announcement_key(said.fingerprint), said.encode(), self._lifetime_s)
