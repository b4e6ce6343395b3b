"""Sessions on the swarm, lent to answers: kept for a while, and continued where a returning history agrees.

A chat sends its whole history with each message. The servers hold most of it already, so the session of the answer
before is trimmed to the common beginning and goes on from there; what is new is all that is computed. Sessions of one
API key are never lent to another: the time of an answer would tell what somebody else has asked.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.apps.gateway.models import GatewayModel
from corolla.client.session import Session
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import CacheFull, Overloaded, Refused
from corolla.models.local_half import LocalCache
from corolla.wire.tensors import DType

log = logging.getLogger(__name__)

HEADROOM_TOKENS: Final = 512
"""A session that may be continued is opened for so many more than its first answer needs."""
WORTH: Final = 0.5
"""A kept session is taken when so much of it, or of the prompt, agrees: else it is better left to its own."""
PATIENCE_S: Final = 0.25
"""An `Open` that has no answer after this long may be waiting for cache that kept sessions hold."""


@dataclass(slots=True, eq=False)
class Lent:
    """A session and what it holds; one answer's until it is given back."""

    model: GatewayModel
    owner: str
    session: Session
    cache: LocalCache
    room: int
    """Tokens a row that it was opened for."""
    tokens: list[int] = field(default_factory=list[int])
    """What the servers hold, of a session of one row."""
    expiry: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ConversationCounters:
    """What came of asking for sessions, for metrics."""

    opened: int = 0
    continued: int = 0
    reused_tokens: int = 0


class Conversations:
    """Sessions in nobody's hands. Belongs to the event loop."""

    def __init__(self, swarm: Swarm, *, keep_s: float, max_kept: int, wait_s: float) -> None:
        self.counters = ConversationCounters()
        self._swarm = swarm
        self._keep_s = keep_s
        self._wait_s = wait_s
        self._num_lent = 0
        self._num_returned = 0
        self._freed = asyncio.Event()
        self._max_kept = max_kept if keep_s > 0 else 0
        self._kept: list[Lent] = []
        """The longest unused first."""

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    async def take(
        self, model: GatewayModel, owner: str, prompt: Sequence[int], *, room: int, rows: int, wire_dtype: DType
    ) -> Lent:
        """A session for `room` tokens a row; `cache.num_tokens` of the prompt it holds. Raises as `start_session`."""
        lent = self._continued(model, owner, prompt, room) if rows == 1 else None
        if lent is None:
            lent = await self._open(
                model, owner, room=room, rows=rows, prompt_tokens=len(prompt), wire_dtype=wire_dtype
            )
            self.counters.opened += 1
            self._num_lent += 1
            return lent
        self._num_lent += 1
        common = _common(lent.tokens, prompt)
        lent.session.trim(common)
        lent.cache.trim(common)
        del lent.tokens[common:]
        self.counters.continued += 1
        self.counters.reused_tokens += common
        return lent

    def give_back(self, lent: Lent, tokens: Sequence[int]) -> None:
        """The answer is complete, and `tokens` what was fed or chosen; the session may be kept."""
        self._returned()
        lent.tokens = list(tokens[: lent.session.position])
        if self._max_kept == 0 or lent.session.rows != 1 or len(lent.tokens) != lent.cache.num_tokens:
            lent.session.close()
            return
        while len(self._kept) >= self._max_kept:
            self._end(self._kept[0])
        lent.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._end, lent)
        self._kept.append(lent)

    def drop(self, lent: Lent) -> None:
        """The answer was broken off: the servers' cache is free before anybody else asks."""
        self._returned()
        lent.session.close()

    def close(self) -> None:
        for lent in list(self._kept):
            self._end(lent)

    def _continued(self, model: GatewayModel, owner: str, prompt: Sequence[int], room: int) -> Lent | None:
        """The kept session that holds most of the prompt; it is no longer kept."""
        mine = [lent for lent in self._kept if lent.model is model and lent.owner == owner]
        best = max(mine, key=lambda lent: _common(lent.tokens, prompt), default=None)
        if best is None:
            return None
        common = _common(best.tokens, prompt)
        if not best.session.survives_any_loss:  # it gave its journal up: a lost server would end the answer
            self._end(best)
            return None
        if common == 0 or common < WORTH * min(len(best.tokens), len(prompt)):
            return None
        if best.room < room:
            self._end(best)  # the same conversation, grown out of it: a larger one takes its place
            return None
        self._forget(best)
        return best

    async def _open(
        self, model: GatewayModel, owner: str, *, room: int, rows: int, prompt_tokens: int, wire_dtype: DType
    ) -> Lent:
        """A new session, with headroom if there is any for one that may be continued."""
        with_headroom = min(room + HEADROOM_TOKENS, max(room, model.context_tokens))
        wanted = with_headroom if rows == 1 and self._num_lent < self._max_kept else room
        deadline = loop_time() + self._wait_s
        while True:
            num_returned = self._num_returned
            opening = self._swarm.start_session(
                model.served, max_tokens=wanted, max_rows=rows, prompt_tokens=prompt_tokens, wire_dtype=wire_dtype
            )
            try:
                session = await self._in_line(asyncio.ensure_future(opening))
            except Refused as refused:
                if self._kept:
                    self._end(self._kept[0])
                elif wanted > room:
                    wanted = room
                elif not isinstance(refused, CacheFull | Overloaded) or not await self._returns(num_returned, deadline):
                    raise
            else:
                return Lent(model, owner, session, model.half.new_cache(), wanted)

    async def _returns(self, num_returned: int, deadline: float) -> bool:
        """Wait for another answer to end, if none has since there were so many: what it held may be what is lacking.

        False: there is none, or it is late.
        """
        if self._num_returned != num_returned:  # while we were being refused
            return loop_time() < deadline
        if self._num_lent == 0:
            return False
        self._freed.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - loop_time())):
                await self._freed.wait()
        except TimeoutError:
            return False
        return True

    def _returned(self) -> None:
        self._num_lent -= 1
        self._num_returned += 1
        self._freed.set()

    async def _in_line(self, opening: "asyncio.Future[Session]") -> Session:
        """Servers let an `Open` wait for cache: while one does, kept sessions make room, the longest unused first."""
        try:
            while True:
                done, _ = await asyncio.wait((opening,), timeout=PATIENCE_S if self._kept else None)
                if done:
                    return opening.result()
                if self._kept:
                    self._end(self._kept[0])
        except asyncio.CancelledError:
            opening.cancel()
            await asyncio.wait((opening,))
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise

    def _end(self, lent: Lent) -> None:
        self._forget(lent)
        lent.session.close()

    def _forget(self, lent: Lent) -> None:
        self._kept.remove(lent)
        if lent.expiry is not None:
            lent.expiry.cancel()


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` are held: the common beginning, short of the prompt's last token."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
