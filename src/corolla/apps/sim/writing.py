"""The sessions of a random life, one after another: prefills, single steps, trims and row gathers, given up or not.

Each output is compared with what one machine would give. A run that was cancelled in its middle, or refused where
cache is short, never counted: the session goes on, or another does.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.session import Session, StepInput
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import HopFailed, NoRoute, Refused
from corolla.wire.tensors import WireTensor

MAX_TOKENS: Final = 200
MAX_ROWS: Final = 3
ANEW: Final = 0.15
"""Of the runs, those that begin another session."""
PATIENCE_S: Final = 300.0
"""Somebody must take a session within this time."""

News = list[list[list[int]]]
"""The inputs of a run: for each step, for each row, its numbers."""
Outputs = Sequence[WireTensor | None]


class WrongText(AssertionError):
    """The swarm computed something else than one machine would."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How the writers of a life go about it."""

    num_runs: tuple[int, int]
    """From, to."""
    cancelled: float = 0.0
    """Of the runs, those that their user gives up, if they last that long."""
    rest_s: tuple[float, float] | None = None
    """Between some runs, longer than servers keep an idle session; None: no such rests."""
    prefill_in_chunks: bool = True
    """False: the model takes several positions only as the first."""
    may_be_refused: bool = False
    """There is not always cache for all."""


class Writer:
    """One user, on a client that may be shared."""

    def __init__(self, client: Swarm, swarm: MemorySwarm, rng: random.Random, manners: Manners) -> None:
        self.recoveries = 0
        self.runs = 0
        self.cancelled = 0
        self.refused = 0
        self._client = client
        self._model = swarm.model
        self._rng = rng
        self._manners = manners
        self._rows: list[list[int]] = []
        """The numbers that the session holds."""
        self._is_gathered = False
        """Rows were gathered for a run that has not come to its end: without any positions there would be none."""
        self._session: Session

    async def write(self) -> None:
        self._rows = [[] for _ in range(self._rng.randint(1, 2))]
        await self._start()
        try:
            for _ in range(self._rng.randint(*self._manners.num_runs)):
                await self._go_on()
                self.runs += 1
                await self._rest()
        finally:
            self._leave()

    async def _go_on(self) -> None:
        try:
            if self._rng.random() < ANEW:
                self._leave()
                await self._begin()
            else:
                await self._run()
        except (HopFailed, NoRoute, Refused):
            if not self._manners.may_be_refused:
                raise
            self.refused += 1
            if self._session.is_closed or self._rng.random() < 0.5:
                self._leave()
                self._rows = [[] for _ in self._rows]
                await self._start()

    async def _rest(self) -> None:
        if self._manners.rest_s is not None and self._rng.random() < 0.15:
            await asyncio.sleep(self._rng.uniform(*self._manners.rest_s))
        elif self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.uniform(0, 2))

    def _leave(self) -> None:
        if not self._session.is_closed:
            self.recoveries += self._session.recoveries
            self._session.close()

    def _new_session(self) -> Session:
        self._is_gathered = False
        return self._client.new_session(self._model, max_tokens=MAX_TOKENS, max_rows=MAX_ROWS)

    async def _start(self) -> None:
        """A new session waits for nobody: as a user would, try again while servers die under it."""
        deadline = loop_time() + PATIENCE_S
        while True:
            self._session = self._new_session()
            try:
                return await self._session.start()
            except (HopFailed, NoRoute, Refused):
                if loop_time() > deadline:
                    raise
                await asyncio.sleep(1)

    async def _begin(self) -> None:
        """A session whose first steps go right behind `Open`."""
        self._rows = [[] for _ in range(self._rng.randint(1, 2))]
        news = self._news()
        deadline = loop_time() + PATIENCE_S
        while True:
            session = self._session = self._new_session()
            try:
                await self._finish(partial(_begin_with, session), news)
            except (HopFailed, NoRoute, Refused):
                if not session.is_closed or loop_time() > deadline:
                    raise
                await asyncio.sleep(1)
            if not session.is_closed:
                return

    async def _run(self) -> None:
        session, rng = self._session, self._rng
        if self._rows[0] and rng.random() < 0.15:
            keep = rng.randint(1 if self._is_gathered else 0, len(self._rows[0]))
            session.trim(keep)
            self._rows = [row[:keep] for row in self._rows]
        if self._rows[0] and rng.random() < 0.15:
            order = [rng.randrange(len(self._rows)) for _ in range(rng.randint(1, MAX_ROWS))]
            session.gather(order)
            self._is_gathered = True
            self._rows = [list(self._rows[index]) for index in order]
        await self._finish(partial(session.run, want="all"), self._news())

    def _news(self) -> News:
        rng = self._rng
        sizes = [rng.choice((1, 1, 1, 3, 5)) for _ in range(rng.choice((1, 1, 1, 4)))]
        if not self._manners.prefill_in_chunks:
            sizes = [1 if number > 0 or self._rows[0] else size for number, size in enumerate(sizes)]
        return [[[rng.getrandbits(32) for _ in range(size)] for _ in self._rows] for size in sizes]

    async def _finish(
        self, start: Callable[[list[StepInput]], Coroutine[Any, Any, list[WireTensor | None]]], news: News
    ) -> None:
        """Run these to their end and look at what came, or give up on the way."""
        run = start([StepInput(hidden_of(new), len(new[0])) for new in news])
        if self._rng.random() < self._manners.cancelled:
            outputs = await self._give_up(run)
        else:
            outputs = await run
        if outputs is not None:
            self._is_gathered = False
            self._rows = _checked(self._model.num_blocks, self._rows, news, outputs)
        if self._session.position != len(self._rows[0]):
            raise WrongText(f"the session counts {self._session.position} positions, not {len(self._rows[0])}")

    async def _give_up(self, run: Coroutine[Any, Any, list[WireTensor | None]]) -> list[WireTensor | None] | None:
        """Cancel it in a while, as Ctrl-C does; its outputs if it was done by then."""
        task = asyncio.create_task(run)
        try:
            await asyncio.wait([task], timeout=self._rng.choice((0.0, 0.1, 0.5, 5.0)) * self._rng.random())
        finally:
            task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        if not task.cancelled():
            return task.result()
        self.cancelled += 1
        return None


async def _begin_with(session: Session, inputs: list[StepInput]) -> list[WireTensor | None]:
    return await session.begin(lambda: inputs, want="all")


def _checked(num_blocks: int, rows: list[list[int]], news: News, outputs: Outputs) -> list[list[int]]:
    """The rows with what is new, once the outputs are found to be right."""
    begin = len(rows[0])
    rows = [row + [number for new in news for number in new[index]] for index, row in enumerate(rows)]
    right = [whole_model(num_blocks, row) for row in rows]
    for new, output in zip(news, outputs, strict=True):
        size = len(new[0])
        expected = [number for row in right for number in row[begin : begin + size]]
        begin += size
        if output is None or numbers_of(output) != expected:
            raise WrongText(f"wrong output at position {begin - size}, {loop_time():.3f} s into the life")
    return rows
