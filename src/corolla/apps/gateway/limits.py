"""How much is done at once, and for whom: each key's rate and concurrency, and one line for everybody.

A request that may not come in is told so at once (429, with `Retry-After`): nothing waits without a bound.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from corolla.apps.gateway.errors import RETRY_BUSY_S, ApiError
from corolla.apps.gateway.keys import ApiKey
from corolla.clock import loop_time
from corolla.net.buckets import Buckets, Rate


class Limits:
    """Belongs to the event loop."""

    def __init__(self, *, max_active: int, max_waiting: int, wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(max_active)
        self._by_key: dict[str, int] = {}
        self._rates: dict[float, Buckets] = {}
        self.active = 0
        self.waiting = 0

    @asynccontextmanager
    async def admit(self, key: ApiKey) -> AsyncGenerator[None]:
        """Hold a place for as long as the block lasts. Raises ApiError 429."""
        held = self._by_key.get(key.id, 0)
        if key.concurrent is not None and held >= key.concurrent:
            raise _too_many(f"this key may have {key.concurrent} requests at a time", RETRY_BUSY_S)
        self._take_rate(key)
        self._by_key[key.id] = held + 1
        try:
            await self._enter()
            self.active += 1
            try:
                yield
            finally:
                self.active -= 1
                self._slots.release()
        finally:
            self._by_key[key.id] -= 1
            if not self._by_key[key.id]:
                del self._by_key[key.id]

    def _take_rate(self, key: ApiKey) -> None:
        per_minute = key.requests_per_minute
        if per_minute is None:
            return
        # A burst of a quarter of a minute's worth: clients come in bunches.
        buckets = self._rates.setdefault(per_minute, Buckets(Rate(per_minute / 60, max(1.0, per_minute / 4))))
        if not buckets.take(key.id, loop_time()):
            wait_s = buckets.wait_s(key.id, loop_time())
            raise _too_many(f"this key may make {per_minute:g} requests a minute", max(1, math.ceil(wait_s)))

    async def _enter(self) -> None:
        if self._slots.locked() and self.waiting >= self._max_waiting:
            raise _too_many(f"{self.waiting} requests are in line already", RETRY_BUSY_S)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise _too_many(f"no place came free within {self._wait_s:g} s", RETRY_BUSY_S) from None
        finally:
            self.waiting -= 1


def _too_many(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, f"{message}; try again later", "rate_limit_exceeded", retry_after_s=retry_after_s)
