"""Serves the session protocol: puts the parts of a server together, and admits sessions and lets them go.

    control.py   clients' control streams: open, replay, close, heartbeats
    opening.py   may this session be opened here? (pure)
    routes.py    its place on a route: the next hop, replays to it
    data.py      incoming data streams: which session each belongs to
    steps.py     the steps on them: judged (session.py, pure), put in line, answered
    journals.py  what all of them keep of what they pushed on
    replies.py   what is said to clients

Everything a session holds (lease, cache, links, place in the tables) is given back by the one task that holds it
(`_hold`), however it ends.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from corolla.clock import loop_time
from corolla.errors import Overloaded, Refused, Unsupported
from corolla.ids import Fingerprint, PeerId, SessionId, short
from corolla.net.liveness import Liveness
from corolla.net.streams import ByteStream, Transport
from corolla.server.admission import Admission
from corolla.server.config import SessionLimits
from corolla.server.control import Control, Controls
from corolla.server.data import DataStreams
from corolla.server.executor import Executor
from corolla.server.hosted import HostedSession, StepJob
from corolla.server.journals import Journals
from corolla.server.kv import CachePool
from corolla.server.meter import SpeedMeter
from corolla.server.opening import caps_of, check_blocks, check_open, check_way, state_of
from corolla.server.push import MAX_JOURNAL_BYTES, Push
from corolla.server.replies import Replies, ServerCounters
from corolla.server.routes import MayDial, Routes
from corolla.server.runner import SpanRunner
from corolla.server.session import on_reopen
from corolla.server.steps import Steps
from corolla.server.tasks import Tasks
from corolla.swarm.capacity import Inflows
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""The client's streams of a session that ends by our doing outlive it by this: were they reset at once, that could come
before our word on the control stream, and the client would take us for dead."""


async def _anyone(_peer: PeerId, _block: int) -> bool:
    return True


class Handler:
    """Serves the session protocol for one span on one transport, until `close`. Needs a running loop."""

    def __init__(
        self,
        transport: Transport,
        runner: SpanRunner,
        executor: Executor,
        pool: CachePool,
        *,
        fingerprint: Fingerprint,
        limits: SessionLimits,
        liveness: Liveness,
        may_dial: MayDial = _anyone,
        listed: frozenset[PeerId] = frozenset(),
        speed: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`speed`: tokens a second (decode, prefill) of the runner's blocks, as measured before."""
        self.transport = transport
        self.host(runner, speed)
        self.executor = executor
        self.pool = pool
        self.fingerprint = fingerprint
        self.limits = limits
        self.counters = ServerCounters()
        self.sessions: dict[tuple[PeerId, SessionId], HostedSession] = {}
        self.on_step: Callable[[StepJob], None] | None = None
        """Told of each step on the device thread, once it is over."""
        self.is_leaving = False
        self.is_away = False
        """Between two spans, hosting nothing: no new session is taken."""
        self.admission = Admission(caps_of(limits, pool.total_pages), listed)
        self.journals = Journals(limits.max_journal_bytes)
        self._tasks = Tasks()
        self._replies = Replies(limits, self.counters)
        self._steps = Steps(
            executor,
            limits,
            self._replies,
            self.counters,
            self._tasks,
            self.admission.bytes_in_flight,
            self._saw_step,
            lambda: len(self.sessions) > 1,
        )
        self._routes = Routes(transport, executor, limits, self._replies, self._tasks, may_dial=may_dial)
        self.inflows = Inflows()
        self._streams = DataStreams(
            limits, lambda: list(self.sessions.values()), self._routes, self._steps,
            lambda peer, bytes_per_s: self.inflows.saw(peer, bytes_per_s, loop_time()),
        )  # fmt: skip
        self._controls = Controls(self, liveness, self._tasks, lambda: executor.queue_s)

    def host(self, runner: SpanRunner, speed: tuple[float, float]) -> None:
        """New sessions are of these blocks from now on; those that are held stay with theirs."""
        self.runner = runner
        decode, prefill = speed
        facts = runner.facts
        self.meter = SpeedMeter(facts.end - facts.start, decode_tokens_per_s=decode, prefill_tokens_per_s=prefill)

    async def start(self) -> None:
        await self.transport.serve(CONTROL_PROTOCOL, self._accept_control)
        # Also while we leave: sessions that are held go on, on new routes too.
        await self.transport.serve(DATA_PROTOCOL, self._streams.accept)

    @property
    def queue_s(self) -> float:
        return self.executor.queue_s

    @property
    def bytes_in_flight(self) -> int:
        """Of steps that have come and are not computed."""
        return self._steps.bytes_in_flight

    @property
    def num_control_streams(self) -> int:
        return len(self._controls)

    async def drain(self, timeout_s: float) -> None:
        """Leave well: take no new session, tell every client, and serve on until all have moved away or time is up."""
        self.is_leaving = True
        self._controls.say_drain(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while self.sessions:
                    await next(iter(self.sessions.values())).is_cleared.wait()
        except TimeoutError:
            log.warning("%d sessions have not moved away in time", len(self.sessions))

    async def let_go(self, timeout_s: float) -> None:
        """Have the clients of all present sessions move away; sessions that are here when time is up are ended."""
        present = list(self.sessions.values())
        self._controls.say_drain(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                for session in present:
                    await session.ended.wait()
        except TimeoutError:
            log.warning("%d sessions have not moved away in time", sum(not s.ended.is_set() for s in present))
        for session in present:
            session.end("the server has moved to other blocks")

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Take no new session, let running steps end, then drop every session and stream."""
        self.is_leaving = True
        self._steps.flush()
        try:
            async with asyncio.timeout(grace_s):
                await self.executor.call(lambda: None)  # behind every step that was submitted
        except TimeoutError:
            log.warning("steps still run after the grace time", extra={"grace_s": grace_s})
        for session in list(self.sessions.values()):
            session.end("the server leaves")
        await self._tasks.close(grace_s=grace_s)
        self._streams.close()
        self._controls.close()

    def _accept_control(self, stream: ByteStream) -> None:
        if self.is_leaving:
            stream.close()
        else:
            self._controls.accept(stream)

    # --- what clients ask on their control streams

    def open_session(self, control: Control, ask: wire.Open) -> None:
        """A new session, or a new route for one that is held."""
        held = self._held(control, ask)
        try:
            if held is not None and ask.route_version > held.state.route_version:
                self._reopen(held, ask)
            else:
                session = self._admit(control, ask)
                self.sessions[control.peer, ask.session] = session
                control.add(session)
                self._tasks.spawn(self._hold(session, ask))
        except Refused as refused:
            self._replies.refuse_open(control.channel, ask, refused)

    def start_replay(self, session: HostedSession, ask: wire.Replay) -> None:
        self._routes.start_replay(session, ask)

    def _held(self, control: Control, ask: wire.Open) -> HostedSession | None:
        """The session under this id, if it goes on."""
        held = self.sessions.get((control.peer, ask.session))
        if held is None or (held.control is control and not held.ended.is_set()):
            return held
        # Its holder has yet to clear it away; or the client has lost the control stream and dialled again.
        held.end("opened anew", by_client=True)
        held.control.forget(held)
        del self.sessions[control.peer, ask.session]
        return None

    def _reopen(self, held: HostedSession, ask: wire.Open) -> None:
        self.admission.admit_route(held.guest, loop_time())
        check_way(ask, own_peer=self.transport.peer, client=held.control.peer)
        check_blocks(ask, held.runner.facts)
        if (ask.start, ask.end) != (held.start, held.stop):
            if not ask.is_fresh:
                asked, open_for = f"{ask.start}:{ask.end}", f"{held.start}:{held.stop}"
                raise Unsupported(f"blocks {asked}: the session is open for {open_for}", value=asked, bound=open_for)
            held.start, held.stop = ask.start, ask.end
        held.state, held.asked = on_reopen(held.state, ask), ask
        held.is_on_route = False
        if held.cache is not None:  # else it waits in line for that, and `_hold` takes the newest route then
            self._tasks.spawn(self._take_route(held, ask))

    def _admit(self, control: Control, ask: wire.Open) -> HostedSession:
        """The new session, or why not. Nothing but its share of the caps is held yet."""
        facts, limits = self.runner.facts, self.limits
        if self.is_leaving:
            raise Overloaded("this server is leaving", value="a new session", bound="sessions it holds")
        if self.is_away:
            raise Overloaded("this server is moving to other blocks", value="a new session", bound="sessions it holds")
        check_open(ask, facts, limits, self.fingerprint)
        check_way(ask, own_peer=self.transport.peer, client=control.peer)
        if (control.peer, ask.session) in self.sessions:
            raise Unsupported("this session is open already", value=ask.session.hex(), bound="an id not in use")
        guest = self.admission.guest(control.peer, self.transport.peer_address(control.peer))
        self.admission.admit_open(guest, ask.max_tokens * ask.max_rows, loop_time())
        return HostedSession(
            state_of(ask, facts, limits, control.peer),
            control, guest, self.runner, ask.start, ask.end, ask.wire_dtype, ask.want, ask, next=None,
            last_used=loop_time(), push=Push(min(MAX_JOURNAL_BYTES, limits.max_journal_bytes)),
        )  # fmt: skip

    def _saw_step(self, job: StepJob) -> None:
        """What the session keeps is counted, and real work keeps the announced speed true. On the device thread."""
        session = job.session
        self.journals.saw(session.push, session.guest)
        if session.runner is self.runner:
            self.meter.saw_step(
                new_tokens=job.new_tokens, rows=job.step.hidden.shape[0], num_blocks=session.stop - session.start,
                compute_s=job.compute_s,
            )  # fmt: skip
        if self.on_step is not None:
            self.on_step(job)

    # --- a session's life

    async def _hold(self, session: HostedSession, ask: wire.Open) -> None:
        """Everything a session has, from lease to last byte, lives exactly as long as this task."""
        control = session.control
        try:
            async with self.pool.reserve(ask.max_tokens, ask.max_rows, timeout_s=self.limits.cache_wait_s):
                if not session.ended.is_set():
                    session.cache = await self.executor.call(
                        partial(session.runner.new_cache, session.start, session.stop, ask.max_tokens),
                        after=session.key,
                    )
                    self.counters.sessions_opened += 1
                    await self._take_route(session, session.asked)
                    await self._until_ended(session)
                    if not session.is_clients_end:  # it knows, and may have opened another under this id
                        control.channel.send(wire.Close(session=ask.session, text=session.end_reason))
        except Refused as refused:
            self._replies.refuse_open(control.channel, session.asked, refused)
        finally:
            if self.sessions.get((control.peer, ask.session)) is session:
                del self.sessions[control.peer, ask.session]
            control.forget(session)
            self.admission.close_session(session.guest, ask.max_tokens * ask.max_rows)
            session.end("the session ended")
            session.push.is_over = True
            if session.cache is not None:
                forget = partial(self.journals.forget, session.push)
                self._tasks.spawn(self.executor.call(forget, after=session.key))
            session.cache = None
            session.is_cleared.set()
            is_farewell = not session.is_clients_end and not self.is_leaving
            session.close_links(keep_clients=is_farewell)
            if is_farewell:
                asyncio.get_running_loop().call_later(FAREWELL_S, session.close_links)
        log.debug("session ended", extra={"peer": short(control.peer), "reason": session.end_reason})

    async def _take_route(self, session: HostedSession, ask: wire.Open) -> None:
        """The session's place on a route, and whatever waited for that."""
        if await self._routes.take(session, ask):
            self._streams.match(session)
            self._routes.take_back_link(session)
            self._steps.read_on(session)

    async def _until_ended(self, session: HostedSession) -> None:
        while not session.ended.is_set():
            idle_left = session.last_used + self.limits.idle_timeout_s - loop_time()
            if idle_left <= 0:
                session.end(f"no step for {self.limits.idle_timeout_s:g} s")
                return
            try:
                async with asyncio.timeout(idle_left):
                    await session.ended.wait()
            except TimeoutError:
                continue
