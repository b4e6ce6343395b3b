"""The steps of all sessions on their way to the device thread: read, judged, put in line, and what follows of each.

    data stream → `take` → `session.on_step` (pure) → `StepJob` → device thread → `Push`, which sends it on

What is read in one iteration of the event loop goes to the device thread as one item, so that companions share a
pass. A step whose time has not come stays unread, and its stream is read no further: whoever sends it is slowed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from corolla.clock import loop_time
from corolla.errors import BadUpstream, JournalGap, Overloaded, Refused
from corolla.ids import short
from corolla.models.finite import is_finite
from corolla.server.admission import Guest, Holdings
from corolla.server.config import SessionLimits
from corolla.server.executor import Executor
from corolla.server.hosted import DataLink, HostedSession, StepJob
from corolla.server.replies import Replies, ServerCounters
from corolla.server.session import AnswerFromJournal, Break, Compute, Ignore, Refuse, Wait, on_step
from corolla.server.tasks import Tasks
from corolla.wire import messages as wire

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.005
"""How often a full outbox is looked at, while steps wait for it."""


class Steps:
    """Carries out what the rules say of each step. Belongs to the loop it is used on."""

    def __init__(
        self,
        executor: Executor,
        limits: SessionLimits,
        replies: Replies,
        counters: ServerCounters,
        tasks: Tasks,
        in_flight: Holdings,
        on_computed: Callable[[StepJob], None],
        has_company: Callable[[], bool],
    ) -> None:
        """`on_computed` is called on the device thread after each step; `has_company` says whether there is more than
        one session: a lone one's step is not kept for others to be read (a turn of the loop, 0.03 ms a hop)."""
        self._executor = executor
        self._limits = limits
        self._replies = replies
        self._counters = counters
        self._tasks = tasks
        self._in_flight = in_flight
        self._over: deque[tuple[Guest, int]] = deque()
        """What the device thread is done with; the loop takes it off the books with the next step."""
        self._on_computed = on_computed
        self._has_company = has_company
        self._loop = asyncio.get_running_loop()
        self._read: list[StepJob] = []
        """Of this iteration of the loop."""

    def take(self, session: HostedSession, link: DataLink, step: wire.Step) -> None:
        """A step has come: run it now, or leave it unread until its turn.

        Whoever has too many bytes of steps here already is refused this one, before the session's state moves: the
        client sends it again.
        """
        try:
            self._book(session, step)
        except Overloaded as refused:
            self._replies.refuse_step(session, step, refused)
            return
        if link.unread or link is not session.upstream_link or not session.takes_steps:
            link.unread.append(step)
            self.read_on(session)
        elif not self._take_now(session, link, step):
            link.unread.append(step)
        if link.unread:
            link.channel.pause()

    def read_on(self, session: HostedSession) -> None:
        """Take what lies unread, as far as its time has come."""
        link = session.upstream_link
        while link is not None and link.unread and session.takes_steps:
            if not self._take_now(session, link, link.unread[0]):
                return
            link.unread.popleft()
            if not link.unread:
                link.channel.resume()
        if link is not None and link.unread and session.is_clogged and not session.awaits_room:
            session.awaits_room = True
            self._loop.call_later(ROOM_POLL_S, self._look_for_room, session)

    def _take_now(self, session: HostedSession, link: DataLink, step: wire.Step) -> bool:
        """False: its time has not come."""
        num_accepted = session.accepted
        if not self._act(session, link, step):
            return False
        if session.accepted == num_accepted:  # no job came of it
            self._over.append((session.guest, step.hidden.nbytes))
        return True

    def _look_for_room(self, session: HostedSession) -> None:
        """Nobody tells us of it."""
        session.awaits_room = False
        if not session.ended.is_set():
            self.read_on(session)

    def forget(self, session: HostedSession, link: DataLink) -> None:
        """The link is gone, and what lay unread on it."""
        for step in link.unread:
            self._in_flight.give_back(session.guest, step.hidden.nbytes)
        link.unread.clear()

    def flush(self) -> None:
        """Hand what was read to the device thread; the books can wait until that has begun."""
        jobs, self._read = self._read, []
        if jobs:
            self._executor.submit(jobs)
        self._clear_books()

    @property
    def bytes_in_flight(self) -> int:
        """Of steps that have come and are not computed. From any thread: it only reads."""
        return max(0, self._in_flight.total - sum(nbytes for _, nbytes in self._over.copy()))

    def _book(self, session: HostedSession, step: wire.Step) -> None:
        """Raises Overloaded."""
        try:
            self._in_flight.take(session.guest, step.hidden.nbytes)
        except Overloaded:
            self._clear_books()  # what is over since the last step may be what was too much
            self._in_flight.take(session.guest, step.hidden.nbytes)

    def _clear_books(self) -> None:
        while self._over:
            self._in_flight.give_back(*self._over.popleft())

    def _act(self, session: HostedSession, link: DataLink, step: wire.Step) -> bool:
        """Carry out what the rules say of a step. False: its time has not come."""
        waiting = self._executor.waiting + len(self._read)
        if waiting >= self._limits.max_waiting_steps:  # before the state moves: the client may repeat the step
            self._replies.refuse_step(session, step, _too_many_steps(waiting + 1, self._limits.max_waiting_steps))
            return True
        state, action = on_step(session.state, step)
        session.last_used = loop_time()
        if isinstance(action, Compute) and not is_finite(step.hidden):
            self._refuse_poison(session, link, step)
            return True
        session.state = state
        match action:
            case Compute():
                session.accepted += 1
                session.accepted_bytes += step.hidden.nbytes
                self._enqueue(self._job(session, step, action.new_tokens))
            case AnswerFromJournal():
                self._tasks.spawn(self._answer_again(session, step))
            case Refuse():
                self._replies.refuse_step(session, step, action.error)
            case Break():
                log.info("protocol broken", extra={"peer": short(link.peer), "reason": str(action.error)[:200]})
                session.end(str(action.error))
            case Ignore():
                pass
            case Wait():
                return False
        return True

    def _refuse_poison(self, session: HostedSession, link: DataLink, step: wire.Step) -> None:
        """Nothing of it reaches the cache, and what follows lies unread until the client has taken another route."""
        session.is_on_route = False
        text = f"step {step.step_no} came with NaN or infinity from {link.peer}"
        self._replies.refuse_step(session, step, BadUpstream(text, value=link.peer))

    async def _answer_again(self, session: HostedSession, step: wire.Step) -> None:
        if not await self._executor.call(partial(session.push.again, step.step_no), after=session.key):
            gap = JournalGap(f"the answer to step {step.step_no} is no longer kept", value=str(step.step_no))
            self._replies.refuse_step(session, step, gap)

    def _job(self, session: HostedSession, step: wire.Step, new_tokens: int) -> StepJob:
        clock = self._executor.clock
        return StepJob(session, step, new_tokens, self._job_done, self._job_failed, clock)

    def _enqueue(self, job: StepJob) -> None:
        self._read.append(job)
        if not self._has_company():
            self.flush()
        elif len(self._read) == 1:
            self._loop.call_soon(self.flush)

    # --- on the device thread

    def _job_done(self, job: StepJob) -> None:
        self._counters.steps += 1
        self._counters.tokens += job.new_tokens * job.step.hidden.shape[0]
        self._over.append((job.session.guest, job.step.hidden.nbytes))
        self._on_computed(job)
        session, link = job.session, job.session.upstream_link
        has_unread = link is not None and link.unread  # perhaps only this step, which the loop has not taken off yet
        if has_unread or (session.is_standby and session.accepted == session.finished):
            self._loop.call_soon_threadsafe(self._go_on, session)

    def _job_failed(self, job: StepJob, refused: Refused) -> None:
        """The cache no longer is what the state says: the session ends, and the client is told why."""
        self._replies.refuse_step(job.session, job.step, refused)
        self._loop.call_soon_threadsafe(job.session.end, "a step failed on the server")

    # --- and back on the loop

    def _go_on(self, session: HostedSession) -> None:
        """Take what lies unread; whoever stands by and has nothing left to do says how far it has got."""
        self.read_on(session)
        if session.is_standby and session.accepted == session.finished and not session.ended.is_set():
            self._replies.opened(session, session.push.journal_from)


def _too_many_steps(waiting: int, bound: int) -> Overloaded:
    text = f"this server holds its {bound} waiting steps already"
    return Overloaded(text, value=str(waiting), bound=str(bound))
