"""Mends a session's route: judges the faults that came, and takes a route on which every place has what it needs.

    1. a fault (stream reset, silence, wrong output, a server's word) wakes the step that waits
    2. substitutes for just the lost blocks; all places take the new route (`Open`), and say what they hold
    3. the nearest journal before a substitute replays to it; places that lack a live step get it again
    4. the step goes on waiting: its output comes as if nothing had been

What a fault calls for is decided in `recovery.py`, who takes a place in `substitutes.py`; `ring.py` takes the route.
"""

import asyncio
import logging

from corolla.client.doubts import after_fault, is_remembered
from corolla.client.hop import Hop
from corolla.client.moving import Mover
from corolla.client.outcomes import PlacesFailed
from corolla.client.recovery import mark_fresh, remedy_for, remedy_for_link
from corolla.client.ring import Ring
from corolla.client.steps import Steps
from corolla.client.substitutes import POLL_S, Substitutes
from corolla.clock import loop_time
from corolla.errors import (
    Faulty,
    HopFailed,
    LinkDown,
    MissingBlocks,
    NoRoute,
    OutOfOrder,
    Overloaded,
    Refused,
    SessionLost,
    SwarmError,
)
from corolla.ids import PeerId, short

log = logging.getLogger(__name__)

OVERLOAD_PAUSE_S = 0.2
RETRY_PAUSES_S = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0)
"""Before a recovery, by how many have brought no answer: the first come at once, a swarm in trouble is not hammered."""
SUSPECT_AFTER = 3
"""Recoveries without an answer, after which a server that cannot go on is not simply replaced once more: the one
before it may send it nonsense."""
MAX_FRUITLESS = 12
"""Recoveries without an answer before the user is told, once the time for which a session waits is over too."""
MAX_TIMEOUTS = 1
"""Servers in turn that let one step's whole time pass; after another the user is told."""
MAX_CONFESSIONS = 3
"""Servers in turn that say of one step that their blocks give NaN: then it is the model in this dtype."""


class Mender:
    """One session's faults. Only one task mends at a time: whoever holds the session's lock, or starts it."""

    def __init__(self, ring: Ring, steps: Steps, substitutes: Substitutes, mover: Mover, *, wait_s: float) -> None:
        """`wait_s`: how long to wait for a server where nothing covers a block."""
        self._ring = ring
        self._steps = steps
        self._substitutes = substitutes
        self._mover = mover
        self._wait_s = wait_s
        self._faults: list[tuple[Hop, SwarmError, bool]] = []
        """Whose, what, and whether we fed that server then."""
        self._fruitless = 0
        """Recoveries since the last answer."""
        self._troubled_since = 0.0
        """Loop time of the first of them."""
        self._confessions = 0
        self._timeouts = 0

    @property
    def has_faults(self) -> bool:
        return bool(self._faults)

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        self._faults.append((hop, error, self._ring.feeds(hop)))

    def on_answer(self) -> None:
        """A step was answered: the route works."""
        self._fruitless = self._confessions = self._timeouts = 0

    async def start(self) -> None:
        """Take the first route. Waits for nobody. Raises NoRoute, Refused or HopFailed."""
        await self._recover(must=False, may_wait=False)

    async def prepare(self) -> None:
        """Mend what broke since the last run, before anything new is sent; now links may be tried again, too, and
        servers left that are about to be gone."""
        must = False
        for hop, error, _ in self._faults:
            if isinstance(error, LinkDown) and hop in self._ring.hops:
                must |= self._judge_link(hop, error.peer)
        must |= self._ring.join_again()
        for hop in self._mover.take_overdue():
            log.info("left between two steps", extra={"peer": short(hop.peer)})
            hop.close()
        if must or self._faults or self._lost():
            await self._recover(must=must)

    async def rebuild(self) -> None:
        """Build every place anew: servers may have gone further than we count."""
        for journal in self._ring.heads.values():
            journal.forget(self._steps.next_no)
        self._ring.places = mark_fresh(self._ring.places, range(len(self._ring.places)))
        await self._recover(must=True)

    async def mend(self) -> None:
        """Judge the faults that came, and do what they call for; then the same steps can go on.

        Raises what is our own mistake, and MissingBlocks when nothing covers a block for long.
        """
        faults, self._faults = self._faults, []
        must, overloaded = False, {hop for hop, error, _ in faults if isinstance(error, Overloaded)}
        for hop, error, is_fed_by_us in faults:
            if hop in overloaded and isinstance(error, OutOfOrder):
                continue  # of the steps behind the one that it refused: they come again with it
            if hop in self._ring.hops:  # else of a place that has been replaced since
                must |= await self._judge(hop, error, is_fed_by_us=is_fed_by_us)
        if must:
            self._count_fruitless(faults[-1][1])
            await asyncio.sleep(RETRY_PAUSES_S[min(self._fruitless - 1, len(RETRY_PAUSES_S) - 1)])
        await self._recover(must=must)

    async def on_quiet(self) -> None:
        """All servers answer us and are idle, and no output comes."""
        if self._ring.has_links:
            await self._stand_between_all()
        elif (owing := self._ring.owing()) is not None:
            self._ring.drop(owing, HopFailed(owing.peer, "it has no work, and has not answered its step"))

    async def on_stuck(self, hop: Hop) -> None:
        """One step has been at work there for far longer than is usual. While nobody else has its blocks, wait on."""
        in_use = frozenset(place.peer for place in self._ring.places)
        try:
            await self._substitutes.find_answering(range(hop.start, hop.end), without=in_use)
        except (NoRoute, PlacesFailed):
            return
        self._ring.drop(hop, HopFailed(hop.peer, "a step has been at work there for far longer than is usual"))

    def on_timeout(self, waited_s: float) -> None:
        """No output in all this time: whoever has work still is to blame, or who owes the step. Raises HopFailed when
        that has happened before, and nothing was answered since."""
        hop = max(self._ring.hops, key=lambda hop: hop.link.life.peer_queue_s)
        if hop.link.life.peer_queue_s == 0:
            hop = self._ring.owing() or self._ring.hops[-1]
        late = HopFailed(hop.peer, f"no output came round within {waited_s:.0f} s, most likely because of it")
        self._timeouts += 1
        if self._timeouts > MAX_TIMEOUTS:
            raise late
        self._ring.drop(hop, late)

    async def _stand_between_all(self) -> None:
        """A link between two of them swallows what they push, or one of them does."""
        log.warning("steps vanish between servers; they go through the client from now on")
        for index in range(1, len(self._ring.places)):
            self._ring.part_link(index)
        await self._recover(must=True)

    async def _judge(self, hop: Hop, error: SwarmError, *, is_fed_by_us: bool) -> bool:
        """Whether a route must be taken anew, though nobody may be lost."""
        if isinstance(error, LinkDown):
            return self._judge_link(hop, error.peer)
        self._confessions += isinstance(error, Faulty)
        if self._confessions >= MAX_CONFESSIONS:
            raise error
        match remedy_for(error, is_fed_by_us=is_fed_by_us, again=self._fruitless >= SUSPECT_AFTER):
            case "repeat":
                await asyncio.sleep(OVERLOAD_PAUSE_S)
            case "rebuild all":
                self._ring.segments.cut_back()
                self._ring.places = mark_fresh(self._ring.places, range(len(self._ring.places)))
            case "rebuild":
                self._ring.places = mark_fresh(self._ring.places, [self._ring.hops.index(hop)])
            case "replace":
                pass  # it is lost: `hop.error` says so, or it will when it is asked again
            case "leave":
                hop.close()
            case "watch":
                log.warning("a wrong answer", extra={"peer": short(hop.peer), "reason": str(error)[:200]})
                self._ring.watch_segment(hop)
            case "ban":
                self._ring.drop(hop, HopFailed(hop.peer, str(error)))
            case "part":
                log.warning("a server complains of the one before it", extra={"peer": short(hop.peer)})
                self._ring.part_at(hop.start, on_suspicion=True)
            case "give up":
                raise error
        return True

    def _judge_link(self, hop: Hop, peer: PeerId) -> bool:
        ring, index = self._ring, self._ring.hops.index(hop)
        again = is_remembered(ring.doubts.get((hop.peer, peer)), loop_time())
        remedy = remedy_for_link(ring.places, self._lost(), index, peer, again=again)
        if remedy == "part":
            log.warning("link goes through the client", extra={"peer": short(hop.peer), "next": short(peer)})
            ring.part_link(index + 1)
        elif remedy == "repeat":
            ring.doubts[hop.peer, peer] = after_fault(loop_time())
        return remedy != "none"

    def _count_fruitless(self, fault: SwarmError) -> None:
        now = loop_time()
        if self._fruitless == 0:
            self._troubled_since = now
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS and now - self._troubled_since > self._wait_s:
            raise fault

    def _lost(self) -> set[int]:
        return {index for index, hop in enumerate(self._ring.hops) if hop.error is not None}

    async def _recover(self, *, must: bool, may_wait: bool = True) -> None:
        """Take a route on which every place holds, or is being given, all that was answered.

        `must`: also when nobody is lost. `may_wait`: for servers, where nothing covers a block.
        """
        deadline = loop_time() + (self._wait_s if may_wait else 0.0)
        self._substitutes.begin()
        problem: SwarmError | None = None
        tried: set[PeerId] = set()
        while True:
            if self._ring.places and not must and not self._faults and not self._lost():
                return
            try:
                async with self._mover.kept_still():
                    self._faults.clear()
                    await self._ring.take(await self._substitutes.wait_for(self._ring.places, self._lost(), deadline))
                return
            except PlacesFailed as failed:
                problem, must = failed.error, True
                self._substitutes.leave_out(failed.errors)
                if tried.issuperset(failed.errors):  # nobody new: give the swarm time
                    if loop_time() >= deadline:
                        raise (_gap_of(failed) if may_wait else problem) from failed
                    self._substitutes.tell_waiting(failed.blocks)
                    await asyncio.sleep(POLL_S)
                tried.update(failed.errors)
            except NoRoute:
                if problem is None or may_wait:
                    raise
                raise problem from None  # there was a chain, and it said no: that is what the user must hear


def _gap_of(failed: PlacesFailed) -> SwarmError:
    """What it comes to that nobody took these places in all the time: a healthy server's no, or no server at all."""
    if isinstance(failed.error, Refused) and not isinstance(failed.error, SessionLost):
        return failed.error
    return MissingBlocks(failed.blocks, f"those that were announced do not answer: {failed.error}")
