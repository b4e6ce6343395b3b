"""Translates frames into calls on the session state machine, and its actions into replies.

The way of a step: data stream → `_Link.on_message` → `session.on_step` (pure) → `StepJob` → device thread →
`Output` on the same stream, written by the device thread itself. Control streams open, watch and close
sessions; everything a session holds (lease, cache, place in the tables) is given back by the one task that
holds it (`_hold`), however it ends.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from corolla.clock import loop_time
from corolla.errors import HopFailed, Overloaded, Refused, RemoteProtocolError, SessionLost, SwarmError, Unsupported
from corolla.ids import Fingerprint, PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness, PeerLife, keep_alive
from corolla.net.streams import ByteStream, Transport
from corolla.server.config import SessionLimits
from corolla.server.executor import Executor
from corolla.server.kv import CachePool
from corolla.server.runner import SessionCache, SpanRunner
from corolla.server.session import AnswerFromJournal, Break, Compute, Ignore, Refuse, SessionState, on_step
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL
from corolla.wire.tensors import DType

log = logging.getLogger(__name__)

MAX_CONTROL_STREAMS_PER_PEER = 4


@dataclass(slots=True)
class Session:
    """One session's mutable side. The loop owns all but `cache` and `last_reply`, which the device thread writes."""

    state: SessionState
    wire_dtype: DType
    want: wire.Want
    last_used: float
    cache: SessionCache | None = None
    last_reply: wire.Output | None = None
    link: "_Link | None" = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    end_reason: str = ""

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.end_reason = reason
            self.ended.set()


@dataclass(slots=True)
class ServerCounters:
    """What the server has done since it started; for logs, status and metrics."""

    steps: int = 0
    tokens: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    sessions_opened: int = 0


class Handler:
    """Serves the session protocol for one span on one transport, until `close`."""

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
    ) -> None:
        self.transport = transport
        self.runner = runner
        self.executor = executor
        self.pool = pool
        self.fingerprint = fingerprint
        self.limits = limits
        self.liveness = liveness
        self.counters = ServerCounters()
        self.sessions: dict[tuple[PeerId, SessionId], Session] = {}
        self._controls: dict[PeerId, list[_Control]] = {}
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: list[StepJob] = []
        self.is_leaving = False

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.transport.serve(CONTROL_PROTOCOL, self._accept_control)
        await self.transport.serve(DATA_PROTOCOL, self._accept_data)

    @property
    def queue_s(self) -> float:
        return self.executor.queue_s

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Take no new session, let running steps end, then drop every session and stream."""
        self.is_leaving = True
        for control in self._all_controls():
            control.channel.send(wire.Drain(deadline_s=grace_s))
        self._flush()
        try:
            async with asyncio.timeout(grace_s):
                await self.executor.call(lambda: None)  # behind every step that was submitted
        except TimeoutError:
            log.warning("steps still run after the grace time", extra={"grace_s": grace_s})
        for session in list(self.sessions.values()):
            session.end("the server leaves")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        for link in list(self._links):
            link.channel.close()
        for control in self._all_controls():
            control.channel.close()

    # --- control streams

    def _accept_control(self, stream: ByteStream) -> None:
        mine = self._controls.setdefault(stream.peer, [])
        if len(mine) >= MAX_CONTROL_STREAMS_PER_PEER or self.is_leaving:
            stream.close()
            return
        control = _Control(self, stream)
        mine.append(control)
        control.watch = self.spawn(self._watch(control))

    async def _watch(self, control: "_Control") -> None:
        """A client that has gone silent gives its sessions back."""
        try:
            await keep_alive(control.life)
        except HopFailed as lost:
            log.info("client lost", extra={"peer": short(control.peer), "reason": lost.reason})
            control.channel.close()

    def control_closed(self, control: "_Control") -> None:
        if control.watch is not None:
            control.watch.cancel()
        mine = self._controls.get(control.peer, [])
        if control in mine:
            mine.remove(control)
        if not mine:
            self._controls.pop(control.peer, None)
        for session in control.sessions:
            session.end("the client's control stream ended")

    def open_session(self, control: "_Control", ask: wire.Open) -> None:
        try:
            session = self._admit(control, ask)
        except Refused as refused:
            self.refuse(control.channel, ask.session, refused, route_version=ask.route_version)
            return
        self.sessions[control.peer, ask.session] = session
        control.sessions.append(session)
        self.spawn(self._hold(control, session, ask))

    def _admit(self, control: "_Control", ask: wire.Open) -> Session:
        """The new session, or why not. Nothing is held yet."""
        facts, limits = self.runner.facts, self.limits
        if self.is_leaving:
            raise Overloaded("this server is leaving")
        if ask.fingerprint != self.fingerprint:
            raise Unsupported(
                f"this server's model has the fingerprint {self.fingerprint}, yours {ask.fingerprint}: "
                "other weights under the same name",
                value=ask.fingerprint, bound=self.fingerprint,
            )  # fmt: skip
        if not facts.start <= ask.start < ask.end <= facts.end:
            raise _out_of_bounds("blocks", f"{ask.start}:{ask.end}", f"{facts.start}:{facts.end}")
        if ask.max_tokens > limits.max_session_tokens:
            raise _out_of_bounds("a session of tokens", str(ask.max_tokens), str(limits.max_session_tokens))
        if ask.max_rows > limits.max_rows:
            raise _out_of_bounds("rows", str(ask.max_rows), str(limits.max_rows))
        if ask.next is not None or ask.upstream != control.peer:
            raise Unsupported("this server answers the client itself; it does not push to another server yet")
        if ask.wire_dtype == "int64":
            raise _out_of_bounds("hidden states as", ask.wire_dtype, "float32, bfloat16 or float16")
        if ask.adapter is not None:
            raise _out_of_bounds("adapter", ask.adapter, "none")
        if (control.peer, ask.session) in self.sessions:
            raise Unsupported("this session is open already")
        if len(self.sessions) >= limits.max_sessions:
            raise _too_many("sessions", len(self.sessions) + 1, limits.max_sessions)
        if len(control.sessions) >= limits.max_sessions_per_peer:
            raise _too_many("sessions of one client", len(control.sessions) + 1, limits.max_sessions_per_peer)
        return Session(
            state=SessionState(
                session=ask.session,
                owner=control.peer,
                upstream=ask.upstream,
                route_version=ask.route_version,
                max_tokens=ask.max_tokens,
                max_rows=ask.max_rows,
                max_chunk_tokens=limits.max_chunk_tokens,
                hidden_size=facts.hidden_size,
                needs_token_ids=facts.needs_token_ids,
                can_trim=facts.can_trim,
            ),
            wire_dtype=ask.wire_dtype,
            want=ask.want,
            last_used=loop_time(),
        )

    async def _hold(self, control: "_Control", session: Session, ask: wire.Open) -> None:
        """Everything a session has, from lease to last byte, lives exactly as long as this task."""
        key = (control.peer, ask.session)
        try:
            async with self.pool.reserve(ask.max_tokens, ask.max_rows, timeout_s=self.limits.cache_wait_s):
                if not session.ended.is_set():
                    session.cache = await self.executor.call(
                        partial(self.runner.new_cache, ask.start, ask.end, ask.max_tokens)
                    )
                    self.counters.sessions_opened += 1
                    control.channel.send(self._opened(ask))
                    await self._until_ended(session)
                    control.channel.send(wire.Close(session=ask.session, text=session.end_reason))
        except Refused as refused:
            self.refuse(control.channel, ask.session, refused, route_version=ask.route_version)
        finally:
            self.sessions.pop(key, None)
            control.forget(session)
            session.cache = None
            if session.link is not None:
                session.link.channel.close()
        log.debug("session ended", extra={"peer": short(control.peer), "reason": session.end_reason})

    def _opened(self, ask: wire.Open) -> wire.Opened:
        return wire.Opened(
            session=ask.session,
            route_version=ask.route_version,
            max_chunk_tokens=self.limits.max_chunk_tokens,
            window_bytes=self.limits.max_chunk_bytes,
            prefill_in_chunks=self.runner.facts.prefill_in_chunks,
            needs_token_ids=self.runner.facts.needs_token_ids,
        )

    async def _until_ended(self, session: Session) -> None:
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

    # --- data streams

    def _accept_data(self, stream: ByteStream) -> None:
        mine = sum(1 for link in self._links if link.peer == stream.peer)
        if mine > self.limits.max_sessions_per_peer or self.is_leaving:
            stream.close()
            return
        link = _Link(self, stream)
        self._links.add(link)
        link.deadline = asyncio.get_running_loop().call_later(
            self.limits.attach_timeout_s, link.fail, RemoteProtocolError("the data stream did not say its session")
        )

    def link_closed(self, link: "_Link") -> None:
        self._links.discard(link)
        if link.session is not None and link.session.link is link:
            link.session.link = None

    def attach(self, link: "_Link", ask: wire.Attach) -> None:
        session = self.sessions.get((link.peer, ask.session))
        control = self._control_of(session)
        if session is None or session.cache is None or control is None:
            self.refuse(link.channel, ask.session, SessionLost("this server holds no such session of yours"))
            return
        if session.link is not None:
            session.link.channel.close()  # the client dialled again: its older stream is dead to it
        session.link = link
        link.session = session
        control.life.include(link.channel)

    def step(self, link: "_Link", session: Session, step: wire.Step) -> None:
        waiting = self.executor.waiting + len(self._pending)
        if waiting >= self.limits.max_waiting_steps:  # before the state moves: the client may repeat the step
            refused = _too_many("waiting steps", waiting + 1, self.limits.max_waiting_steps)
            self.refuse(link.channel, session.state.session, refused, step_no=step.step_no)
            return
        session.state, action = on_step(session.state, step)
        session.last_used = loop_time()
        match action:
            case Compute():
                self._enqueue(StepJob(self, session, link, step, action.new_tokens))
            case AnswerFromJournal():
                if session.last_reply is not None and session.last_reply.step_no == action.step_no:
                    link.channel.send(session.last_reply)
                # else it is still being computed: its reply goes to the session's present link
            case Refuse():
                self.refuse(link.channel, session.state.session, action.error, step_no=action.step_no,
                            route_version=step.route_version)  # fmt: skip
            case Break():
                session.end(str(action.error))
                link.fail(action.error)
            case Ignore():
                pass

    def _enqueue(self, job: "StepJob") -> None:
        """What one iteration of the loop reads goes to the device thread as one item: companions share a pass."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(job)

    def _flush(self) -> None:
        jobs, self._pending = self._pending, []
        if jobs:
            self.executor.submit(jobs)

    # --- replies

    def refuse(
        self,
        channel: Channel,
        session: SessionId,
        refused: Refused,
        *,
        step_no: int | None = None,
        route_version: int = 0,
    ) -> None:
        self.counters.refusals[refused.code] = self.counters.refusals.get(refused.code, 0) + 1
        log.info("refused", extra={"peer": short(channel.peer), "code": refused.code, "bound": refused.bound})
        channel.send(
            wire.Refused(
                session=session,
                route_version=route_version,
                step_no=step_no,
                code=refused.code,
                text=refused.text[:1024],
                value=refused.value[:64],
                bound=refused.bound[:64],
            )
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a server task failed", exc_info=failure)

    def _control_of(self, session: Session | None) -> "_Control | None":
        mine = [] if session is None else self._controls.get(session.state.owner, [])
        return next((control for control in mine if session in control.sessions), None)

    def _all_controls(self) -> "list[_Control]":
        return [control for mine in self._controls.values() for control in mine]


class _Control:
    """One client's control stream and the sessions opened on it."""

    def __init__(self, handler: Handler, stream: ByteStream) -> None:
        self.handler = handler
        self.peer = stream.peer
        self.sessions: list[Session] = []
        self.watch: asyncio.Task[None] | None = None
        self.channel = Channel(stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed)
        self.life = PeerLife(self.channel, handler.liveness, queue_s=lambda: handler.queue_s)

    def forget(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)

    def _on_message(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Open():
                self.handler.open_session(self, message)
            case wire.Close():
                for session in self.sessions:
                    if session.state.session == message.session:
                        session.end("closed by the client")
            case wire.Heartbeat():
                self.life.on_heartbeat(message)
            case _:
                raise RemoteProtocolError(f"a client sent {type(message).__name__} on its control stream")

    def _on_closed(self, _error: SwarmError | None) -> None:
        self.handler.control_closed(self)


class _Link:
    """One data stream; after its `Attach` it belongs to one session."""

    def __init__(self, handler: Handler, stream: ByteStream) -> None:
        self.handler = handler
        self.peer = stream.peer
        self.session: Session | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.channel = Channel(stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed)

    def fail(self, error: SwarmError) -> None:
        log.info("data stream ended", extra={"peer": short(self.peer), "reason": str(error)[:200]})
        self.channel.close()

    def _on_message(self, message: wire.AnyMessage) -> None:
        if self.session is None:
            if not isinstance(message, wire.Attach):
                raise RemoteProtocolError(f"a data stream began with {type(message).__name__}, not Attach")
            if self.deadline is not None:
                self.deadline.cancel()
            self.handler.attach(self, message)
        elif isinstance(message, wire.Step):
            self.handler.step(self, self.session, message)
        else:
            raise RemoteProtocolError(f"a client sent {type(message).__name__} on a data stream")

    def _on_closed(self, _error: SwarmError | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.handler.link_closed(self)


@dataclass(slots=True)
class StepJob:
    """One step on its way through the device thread; sends its own output."""

    handler: Handler
    session: Session
    link: _Link
    step: wire.Step
    new_tokens: int
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens > 1

    def run(self) -> None:
        session, step, cache = self.session, self.step, self.session.cache
        if cache is None:  # the session ended while the step waited in line
            return
        started = time.perf_counter()
        try:
            hidden = self.handler.runner.run(cache, step, step.want or session.want, session.wire_dtype)
        except Refused as refused:  # the family's state cannot be brought back, say
            self._fail(refused)
            return
        except Exception as failure:
            log.exception("a step failed", extra={"peer": short(session.state.owner)})
            self._fail(SessionLost(f"the step failed on the server ({type(failure).__name__}); the session is lost"))
            return
        done = time.perf_counter()
        output = wire.Output(
            step_no=step.step_no,
            route_version=step.route_version,
            position=step.position + self.new_tokens,
            hidden=hidden,
            timings=[wire.HopTiming(started - self.arrived, done - started, 0.0)],
        )
        session.last_reply = output
        link = session.link or self.link
        link.channel.send(output)
        counters = self.handler.counters
        counters.steps += 1
        counters.tokens += self.new_tokens * step.hidden.shape[0]

    def _fail(self, refused: Refused) -> None:
        """The cache no longer is what the state says: the session ends, and the client is told why."""
        self.handler.refuse(
            self.link.channel, self.session.state.session, refused,
            step_no=self.step.step_no, route_version=self.step.route_version,
        )  # fmt: skip
        self.handler.loop.call_soon_threadsafe(self.session.end, "a step failed on the server")


def _out_of_bounds(what: str, value: str, bound: str) -> Unsupported:
    return Unsupported(f"{what} {value}: this server takes {bound}", value=value, bound=bound)


def _too_many(what: str, value: int, bound: int) -> Overloaded:
    return Overloaded(f"this server holds its {bound} {what} already", value=str(value), bound=str(bound))
