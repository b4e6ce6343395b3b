"""The right to KV cache: pages leased to sessions, in the order they asked.

A page holds the keys and values of `PAGE_TOKENS` positions of one row in every block of the span. A lease is
counted when the session opens, for all the positions it may ever hold: a stranger's session can then never run
out in mid-sentence. The tensors themselves live in the session's cache (`models/cache.py`).
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from corolla.errors import CacheFull

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to `pages` pages, until the `reserve` block that gave it ends."""

    pages: int


class CachePool:
    """A fixed number of pages, and a first-come line for them. One event loop owns it."""

    def __init__(self, capacity_tokens: int) -> None:
        self.total_pages = capacity_tokens // PAGE_TOKENS
        self.free_pages = self.total_pages
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free_tokens(self) -> int:
        return self.free_pages * PAGE_TOKENS

    @asynccontextmanager
    async def reserve(self, num_tokens: int, rows: int, *, timeout_s: float) -> AsyncIterator[Lease]:
        """Hold pages for `rows` × `num_tokens` positions inside the block. Raises CacheFull when none free up."""
        pages = pages_for(num_tokens, rows)
        await self._take(pages, timeout_s)
        try:
            yield Lease(pages)
        finally:
            self._give_back(pages)  # no await: cancellation cannot skip it

    async def _take(self, pages: int, timeout_s: float) -> None:
        if pages > self.total_pages:
            total = self.total_pages * PAGE_TOKENS
            raise _full(pages, total, f"it has {total} in all")
        if not self._line and pages <= self.free_pages:
            self.free_pages -= pages
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((pages, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            self._leave_line(pages, turn)
            free = self.free_tokens
            raise _full(pages, free, f"{free} were free after waiting {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._leave_line(pages, turn)
            raise

    def _leave_line(self, pages: int, turn: asyncio.Future[None]) -> None:
        """Whoever gives up lets the next one through; pages granted in the very moment of giving up go back."""
        if turn.done() and not turn.cancelled():
            self._give_back(pages)
        else:
            turn.cancel()
            self._serve_line()

    def _give_back(self, pages: int) -> None:
        self.free_pages += pages
        assert self.free_pages <= self.total_pages
        self._serve_line()

    def _serve_line(self) -> None:
        while self._line and (self._line[0][1].done() or self._line[0][0] <= self.free_pages):
            pages, turn = self._line.popleft()
            if not turn.done():
                self.free_pages -= pages
                turn.set_result(None)


def pages_for(num_tokens: int, rows: int) -> int:
    """Whole pages for each of `rows` rows of `num_tokens` positions."""
    return rows * math.ceil(num_tokens / PAGE_TOKENS)


def _full(pages: int, bound: int, why: str) -> CacheFull:
    wanted = pages * PAGE_TOKENS
    return CacheFull(
        f"the session needs {wanted} cache tokens on this server; {why}", value=str(wanted), bound=str(bound)
    )
