"""Translates frames into calls on the session state machine, and its actions into replies.

The way of a step: data stream → `DataStream` → `session.on_step` (pure) → `StepJob` → device thread → `Push`, which
sends it on to the next hop, or as an `Output` to the client. Control streams open, re-route, watch and close
sessions; everything a session holds (lease, cache, links, place in the tables) is given back by the one task that
holds it (`_hold`), however it ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from corolla.clock import loop_time
from corolla.errors import HopFailed, JournalGap, Overloaded, Refused, RemoteProtocolError, SwarmError, Unsupported
from corolla.ids import Fingerprint, PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness, PeerLife, keep_alive
from corolla.net.streams import ByteStream, Transport
from corolla.server.admission import Admission, AdmissionLimits, Cap
from corolla.server.config import SessionLimits
from corolla.server.executor import Executor
from corolla.server.hosted import DataLink, HostedSession, StepJob
from corolla.server.kv import PAGE_TOKENS, CachePool
from corolla.server.push import send_paced
from corolla.server.runner import SpanRunner
from corolla.server.session import (
    AnswerFromJournal,
    Break,
    Compute,
    Ignore,
    Refuse,
    SessionState,
    Wait,
    on_reopen,
    on_step,
)
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

log = logging.getLogger(__name__)

MAX_CONTROL_STREAMS_PER_PEER = 4

MayDial = Callable[[PeerId, int], Awaitable[bool]]
"""Whether a peer is announced for this model, with a span that goes on at this block."""


@dataclass(slots=True)
class ServerCounters:
    """What the server has done since it started; for logs, status and metrics."""

    steps: int = 0
    tokens: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    sessions_opened: int = 0
    links_down: int = 0


async def _anyone(_peer: PeerId, _block: int) -> bool:
    return True


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
        may_dial: MayDial = _anyone,
        listed: frozenset[PeerId] = frozenset(),
    ) -> None:
        self.transport = transport
        self.runner = runner
        self.executor = executor
        self.pool = pool
        self.fingerprint = fingerprint
        self.limits = limits
        self.liveness = liveness
        self.counters = ServerCounters()
        self.sessions: dict[tuple[PeerId, SessionId], HostedSession] = {}
        self.is_leaving = False
        self._may_dial = may_dial
        self._admission = Admission(_caps(limits, pool), listed)
        self._controls: dict[PeerId, list[Control]] = {}
        self._streams: set[DataStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: list[StepJob] = []

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.transport.serve(CONTROL_PROTOCOL, self._accept_control)
        await self.transport.serve(DATA_PROTOCOL, self._accept_data)

    @property
    def queue_s(self) -> float:
        return self.executor.queue_s

    async def drain(self, timeout_s: float) -> None:
        """Leave well: take no new session, tell every client, and serve on until all have moved away or time is up."""
        self.is_leaving = True
        for control in self._all_controls():
            control.channel.send(wire.Drain(deadline_s=timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                while self.sessions:
                    await next(iter(self.sessions.values())).ended.wait()
                    await asyncio.sleep(0)  # its holder takes it off the table
        except TimeoutError:
            log.warning("%d sessions have not moved away in time", len(self.sessions))

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Take no new session, let running steps end, then drop every session and stream."""
        self.is_leaving = True
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
        for stream in list(self._streams):
            stream.channel.close()
        for control in self._all_controls():
            control.channel.close()

    # --- control streams

    def _accept_control(self, stream: ByteStream) -> None:
        mine = self._controls.setdefault(stream.peer, [])
        if len(mine) >= MAX_CONTROL_STREAMS_PER_PEER or self.is_leaving:
            stream.close()
            return
        control = Control(self, stream)
        mine.append(control)
        control.watch = self.spawn(self._watch(control))

    async def _watch(self, control: "Control") -> None:
        """A client that has gone silent gives its sessions back."""
        try:
            await keep_alive(control.life)
        except HopFailed as lost:
            log.info("client lost", extra={"peer": short(control.peer), "reason": lost.reason})
            control.channel.close()

    def control_closed(self, control: "Control") -> None:
        if control.watch is not None:
            control.watch.cancel()
        mine = self._controls.get(control.peer, [])
        if control in mine:
            mine.remove(control)
        if not mine:
            self._controls.pop(control.peer, None)
        for session in control.sessions:
            session.end("the client's control stream ended")

    def open_session(self, control: "Control", ask: wire.Open) -> None:
        """A new session, or a new route for one that is held."""
        held = self.sessions.get((control.peer, ask.session))
        if held is not None and (held.ended.is_set() or held.control is not control):
            # Its holder has yet to clear it away; or the client has lost the control stream and dialled again.
            held.end("opened anew")
            held.control.forget(held)
            del self.sessions[control.peer, ask.session]
            held = None
        try:
            if held is not None and ask.route_version > held.state.route_version:
                self._check_way(control, ask)
                self._check_blocks(ask)
                if (ask.start, ask.end) != (held.start, held.stop):
                    if not ask.is_fresh:
                        raise Unsupported(f"the session is open for blocks {held.start}:{held.stop}")
                    held.start, held.stop = ask.start, ask.end
                held.state = on_reopen(held.state, ask)
                held.is_on_route = False
                self.spawn(self._reroute(held, ask))
                return
            session = self._admit(control, ask)
        except Refused as refused:
            self.refuse(control.channel, ask.session, refused, route_version=ask.route_version)
            return
        self.sessions[control.peer, ask.session] = session
        control.sessions.append(session)
        self.spawn(self._hold(session, ask))

    def _admit(self, control: "Control", ask: wire.Open) -> HostedSession:
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
        self._check_blocks(ask)
        if ask.max_tokens > limits.max_session_tokens:
            raise _out_of_bounds("a session of tokens", str(ask.max_tokens), str(limits.max_session_tokens))
        if ask.max_rows > limits.max_rows:
            raise _out_of_bounds("rows", str(ask.max_rows), str(limits.max_rows))
        if ask.wire_dtype == "int64":
            raise _out_of_bounds("hidden states as", ask.wire_dtype, "float32, bfloat16 or float16")
        if ask.adapter is not None:
            raise _out_of_bounds("adapter", ask.adapter, "none")
        self._check_way(control, ask)
        if (control.peer, ask.session) in self.sessions:
            raise Unsupported("this session is open already")
        guest = self._admission.guest(control.peer, self.transport.peer_address(control.peer))
        self._admission.admit_open(guest, ask.max_tokens * ask.max_rows, loop_time())
        state = SessionState(
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
        )
        return HostedSession(
            state, control, guest, ask.start, ask.end, ask.wire_dtype, ask.want, next=None, last_used=loop_time()
        )

    def _check_blocks(self, ask: wire.Open) -> None:
        facts = self.runner.facts
        if not facts.start <= ask.start < ask.end <= facts.end:
            raise _out_of_bounds("blocks", f"{ask.start}:{ask.end}", f"{facts.start}:{facts.end}")

    def _check_way(self, control: "Control", ask: wire.Open) -> None:
        if self.transport.peer in (ask.upstream, ask.next):
            raise Unsupported("a hop cannot be its own neighbour")
        if ask.next == control.peer:
            raise Unsupported("outputs for the client go back on its own stream: leave `next` out")

    async def _hold(self, session: HostedSession, ask: wire.Open) -> None:
        """Everything a session has, from lease to last byte, lives exactly as long as this task."""
        control = session.control
        try:
            async with self.pool.reserve(ask.max_tokens, ask.max_rows, timeout_s=self.limits.cache_wait_s):
                if not session.ended.is_set():
                    session.cache = await self.executor.call(
                        partial(self.runner.new_cache, ask.start, ask.end, ask.max_tokens)
                    )
                    self.counters.sessions_opened += 1
                    await self._reroute(session, ask)
                    await self._until_ended(session)
                    control.channel.send(wire.Close(session=ask.session, text=session.end_reason))
        except Refused as refused:
            self.refuse(control.channel, ask.session, refused, route_version=ask.route_version)
        finally:
            if self.sessions.get((control.peer, ask.session)) is session:
                del self.sessions[control.peer, ask.session]
            control.forget(session)
            self._admission.close_session(session.guest, ask.max_tokens * ask.max_rows)
            session.end("the session ended")
            session.cache = None
            session.close_links()
        log.debug("session ended", extra={"peer": short(control.peer), "reason": session.end_reason})

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

    # --- routes

    async def _reroute(self, session: HostedSession, ask: wire.Open) -> None:
        """Put the session on the route that `ask` names, and tell the client what is held."""
        if ask.next != session.next:
            session.push.channel = None
            if session.onward is not None:
                session.onward.close()
                session.onward = None
            session.reached_next.clear()
            session.next = ask.next
        session.awaits_replay, session.is_standby = ask.hold, ask.standby
        session.is_on_route = False
        journal_from = await self.executor.call(partial(session.take_route, ask, self.runner))
        if session.ended.is_set() or session.state.route_version != ask.route_version:
            return
        session.is_on_route = True
        if ask.next is not None and not session.reached_next.is_set() and not ask.standby:
            self.spawn(self._dial_next(session, ask.next))
        session.control.channel.send(self._opened(session, journal_from))
        for stream in list(self._streams):
            stream.match(session)
        self._take_back_link(session)
        self._read_on(session)

    def _opened(self, session: HostedSession, journal_from: int) -> wire.Opened:
        return wire.Opened(
            session=session.state.session,
            route_version=session.state.route_version,
            cached_tokens=session.state.position,
            last_step_no=session.state.last_step_no,
            journal_from=journal_from,
            max_chunk_tokens=self.limits.max_chunk_tokens,
            window_bytes=self.limits.max_chunk_bytes,
            prefill_in_chunks=self.runner.facts.prefill_in_chunks,
            needs_token_ids=self.runner.facts.needs_token_ids,
        )

    async def _dial_next(self, session: HostedSession, peer: PeerId) -> None:
        """Open the data stream to the next hop; by peer id only, and only to one announced for what comes next."""
        try:
            channel = session.aside.pop(peer, None) or await self._reach(session, peer)
        except HopFailed as failed:
            self._link_down(session, peer, failed.reason)
            return
        if session.ended.is_set() or session.next != peer or session.reached_next.is_set():
            channel.close()
            return
        session.onward = session.push.channel = channel
        session.reached_next.set()
        if not session.awaits_replay:
            await self.executor.call(session.push.release)

    async def _reach(self, session: HostedSession, peer: PeerId) -> Channel:
        """A data stream to a server that goes on where we end. Raises HopFailed.

        Whether it is announced for that is looked up beside the dial, not before: a recovery would wait for it.
        """
        stream = await self.transport.dial(peer, DATA_PROTOCOL, timeout_s=self.limits.dial_timeout_s)
        channel = Channel(
            stream, we_dialed=True, on_message=_expect_nothing, on_closed=partial(self._next_lost, session, peer)
        )
        channel.send(wire.Attach(session=session.state.session, route_version=session.state.route_version))
        self.spawn(self._check_neighbour(session, peer, channel))
        return channel

    async def _check_neighbour(self, session: HostedSession, peer: PeerId, channel: Channel) -> None:
        """Nobody makes us talk to a stranger: close the stream again when the peer is not announced."""
        if not await self._may_dial(peer, session.stop):
            channel.close()
            self._link_down(session, peer, f"it is not announced for block {session.stop} of this model")

    def _next_lost(self, session: HostedSession, peer: PeerId, error: SwarmError | None) -> None:
        session.aside.pop(peer, None)
        if error is None or session.next != peer or session.ended.is_set():
            return  # we closed it ourselves, or it only stood by
        session.push.channel = None
        session.reached_next.clear()
        state = session.state
        session.control.channel.send(
            wire.HopLost(session=state.session, route_version=state.route_version, peer=peer, step_no=None)
        )

    def _link_down(self, session: HostedSession, peer: PeerId, reason: str) -> None:
        self.counters.links_down += 1
        if session.next == peer and not session.ended.is_set():
            state = session.state
            session.control.channel.send(
                wire.LinkDown(session=state.session, route_version=state.route_version, peer=peer, text=reason[:1024])
            )

    def start_replay(self, session: HostedSession, ask: wire.Replay) -> None:
        if ask.route_version == session.state.route_version:
            self.spawn(self._replay(session, ask) if ask.to is None else self._replay_aside(session, ask, ask.to))

    async def _replay(self, session: HostedSession, ask: wire.Replay) -> None:
        """Send the next hop what it lacks; what is computed meanwhile follows in order."""
        if session.next is not None:
            try:
                async with asyncio.timeout(self.limits.dial_timeout_s):
                    await session.reached_next.wait()
            except TimeoutError:
                return  # `LinkDown` was said
        push, channel = session.push, session.push.channel
        if ask.from_position is None:
            await self.executor.call(partial(push.release, ask.from_step, ask.live_from))
        elif channel is not None:
            limits = self.limits
            steps = await self.executor.call(
                partial(push.snapshot, ask.from_position, limits.max_chunk_tokens, limits.max_chunk_bytes,
                        ask.live_from)
            )  # fmt: skip
            await send_paced(channel, steps, ask.route_version)
            await self.executor.call(push.release)
        session.awaits_replay = False

    async def _replay_aside(self, session: HostedSession, ask: wire.Replay, peer: PeerId) -> None:
        """Build the cache of a peer that stands by, while the route goes on as it is."""
        try:
            channel = session.aside.get(peer) or await self._reach(session, peer)
        except HopFailed as failed:
            log.info("cannot reach who stands by", extra={"peer": short(peer), "reason": failed.reason})
            return  # the client hears of no progress, and moves otherwise
        if session.ended.is_set() or not channel.is_open:
            channel.close()
            return
        session.aside[peer] = channel
        limits = self.limits
        steps = await self.executor.call(
            partial(session.push.copy, ask.from_position or 0, limits.max_chunk_tokens, limits.max_chunk_bytes,
                    ask.live_from)
        )  # fmt: skip
        await send_paced(channel, steps, ask.route_version)

    # --- data streams

    def _accept_data(self, stream: ByteStream) -> None:
        mine = sum(1 for other in self._streams if other.peer == stream.peer)
        if mine >= self.limits.max_sessions:  # not `is_leaving`: sessions that are held go on, on new routes too
            stream.close()
            return
        self._streams.add(DataStream(self, stream))

    def stream_closed(self, stream: "DataStream") -> None:
        self._streams.discard(stream)
        session, link = stream.session, stream.link
        if session is not None and link is not None and session.links.get(link.peer) is link:
            del session.links[link.peer]
            if session.push.channel is link.channel:
                session.push.channel = None

    def attach(self, stream: "DataStream", session: HostedSession) -> None:
        """Give a data stream to the session that it names."""
        link = DataLink(stream.peer, stream.channel)
        stream.session, stream.link = session, link
        older = session.links.pop(stream.peer, None)
        session.links[stream.peer] = link
        if older is not None:
            older.channel.close()  # its peer dialled again: the older stream is dead to it
        session.control.life.include(stream.channel)
        self._take_back_link(session)

    def _take_back_link(self, session: HostedSession) -> None:
        """Outputs for the client leave on the stream that it opened to us."""
        link = session.links.get(session.state.owner)
        if session.next is None and link is not None and session.push.channel is not link.channel:
            session.push.channel = link.channel
            self.spawn(self._release(session))

    async def _release(self, session: HostedSession) -> None:
        if not session.awaits_replay:
            await self.executor.call(session.push.release)

    def take_step(self, session: HostedSession, link: DataLink, step: wire.Step) -> None:
        """A step has come: run it now, or leave it unread until its turn."""
        link.unread.append(step)
        self._read_on(session)
        if link.unread:
            link.channel.pause()

    def _read_on(self, session: HostedSession) -> None:
        link = session.upstream_link
        while link is not None and link.unread and session.takes_steps:
            if not self._act(session, link, link.unread[0]):
                return
            link.unread.popleft()
            if not link.unread:
                link.channel.resume()

    def _act(self, session: HostedSession, link: DataLink, step: wire.Step) -> bool:
        """Carry out what the rules say of a step. False: its time has not come."""
        waiting = self.executor.waiting + len(self._pending)
        if waiting >= self.limits.max_waiting_steps:  # before the state moves: the client may repeat the step
            refused = _too_many("waiting steps", waiting + 1, self.limits.max_waiting_steps)
            self._refuse_step(session, step, refused)
            return True
        session.state, action = on_step(session.state, step)
        session.last_used = loop_time()
        match action:
            case Compute():
                session.accepted += 1
                self._enqueue(StepJob(session, self.runner, step, action.new_tokens, self._job_done, self._job_failed))
            case AnswerFromJournal():
                self.spawn(self._answer_again(session, step))
            case Refuse():
                self._refuse_step(session, step, action.error)
            case Break():
                log.info("protocol broken", extra={"peer": short(link.peer), "reason": str(action.error)[:200]})
                session.end(str(action.error))
            case Ignore():
                pass
            case Wait():
                return False
        return True

    async def _answer_again(self, session: HostedSession, step: wire.Step) -> None:
        if not await self.executor.call(partial(session.push.again, step.step_no)):
            gap = JournalGap(f"the answer to step {step.step_no} is no longer kept", value=str(step.step_no))
            self._refuse_step(session, step, gap)

    def _enqueue(self, job: StepJob) -> None:
        """What one iteration of the loop reads goes to the device thread as one item: companions share a pass."""
        if not self._pending:
            self.loop.call_soon(self._flush)
        self._pending.append(job)

    def _flush(self) -> None:
        jobs, self._pending = self._pending, []
        if jobs:
            self.executor.submit(jobs)

    def _job_done(self, job: StepJob) -> None:
        self.counters.steps += 1
        self.counters.tokens += job.new_tokens * job.step.hidden.shape[0]
        session, link = job.session, job.session.upstream_link
        if link is not None and link.unread:
            self.loop.call_soon_threadsafe(self._read_on, session)
        elif session.is_standby and session.accepted == session.finished:
            self.loop.call_soon_threadsafe(self._tell_progress, session)

    def _tell_progress(self, session: HostedSession) -> None:
        if session.is_standby and not session.ended.is_set():
            session.control.channel.send(self._opened(session, session.push.journal_from))

    def _job_failed(self, job: StepJob, refused: Refused) -> None:
        """The cache no longer is what the state says: the session ends, and the client is told why."""
        self._refuse_step(job.session, job.step, refused)
        self.loop.call_soon_threadsafe(job.session.end, "a step failed on the server")

    # --- replies

    def _refuse_step(self, session: HostedSession, step: wire.Step, refused: Refused) -> None:
        self.refuse(
            session.control.channel, session.state.session, refused,
            step_no=step.step_no, route_version=step.route_version,
        )  # fmt: skip

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

    def _all_controls(self) -> "list[Control]":
        return [control for mine in self._controls.values() for control in mine]


class Control:
    """One client's control stream and the sessions opened on it."""

    def __init__(self, handler: Handler, stream: ByteStream) -> None:
        self.handler = handler
        self.peer = stream.peer
        self.sessions: list[HostedSession] = []
        self.watch: asyncio.Task[None] | None = None
        self.channel = Channel(stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed)
        self.life = PeerLife(self.channel, handler.liveness, queue_s=lambda: handler.queue_s)

    def forget(self, session: HostedSession) -> None:
        if session in self.sessions:
            self.sessions.remove(session)

    def _on_message(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Open():
                self.handler.open_session(self, message)
            case wire.Replay():
                if (session := self._session(message.session)) is not None:
                    self.handler.start_replay(session, message)
            case wire.Close():
                if (session := self._session(message.session)) is not None:
                    session.end("closed by the client")
            case wire.Heartbeat():
                self.life.on_heartbeat(message)
            case _:
                raise RemoteProtocolError(f"a client sent {type(message).__name__} on its control stream")

    def _session(self, which: SessionId) -> HostedSession | None:
        return next((session for session in self.sessions if session.state.session == which), None)

    def _on_closed(self, _error: SwarmError | None) -> None:
        self.handler.control_closed(self)


class DataStream:
    """One incoming data stream; its `Attach` says which session it belongs to, before or after that is opened."""

    def __init__(self, handler: Handler, stream: ByteStream) -> None:
        self.handler = handler
        self.peer = stream.peer
        self.session: HostedSession | None = None
        self.link: DataLink | None = None
        self._asked: SessionId | None = None
        self._early: list[wire.Step] = []
        """Steps that came before their session was opened; reading is paused meanwhile."""
        self.channel = Channel(stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed)
        self._deadline = handler.loop.call_later(handler.limits.attach_timeout_s, self._give_up)

    def match(self, session: HostedSession) -> None:
        """Belong to this session, if it is the one that was asked for and this peer is one of its neighbours."""
        if self.session is not None or self._asked != session.state.session:
            return
        if self.peer not in (session.state.owner, session.state.upstream):
            return
        self._deadline.cancel()
        self.handler.attach(self, session)
        early, self._early = self._early, []
        self.channel.resume()
        for step in early:
            self._take(step)

    def _on_message(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Step) and self._asked is not None:
            if self.session is None:
                self._early.append(message)
            else:
                self._take(message)
        elif isinstance(message, wire.Attach) and self._asked is None:
            self._asked = message.session
            for session in list(self.handler.sessions.values()):
                if session.cache is not None:
                    self.match(session)
            if self.session is None:
                self.channel.pause()
        else:
            raise RemoteProtocolError(f"{type(message).__name__} does not belong here on a data stream")

    def _take(self, step: wire.Step) -> None:
        assert self.session is not None
        assert self.link is not None
        self.handler.take_step(self.session, self.link, step)

    def _give_up(self) -> None:
        """The session was never opened here, or is another peer's: its client will have moved on."""
        log.info("data stream of no session", extra={"peer": short(self.peer), "asked": self._asked is not None})
        self.channel.close()

    def _on_closed(self, _error: SwarmError | None) -> None:
        self._deadline.cancel()
        self.handler.stream_closed(self)


def _caps(limits: SessionLimits, pool: CachePool) -> AdmissionLimits:
    """What one client and one address may take of this server.

    One client: half of the cache, or one session of the longest kind. One address, and all together: several times
    the cache, since what does not fit waits in line for it.
    """
    tokens = max(pool.total_pages * PAGE_TOKENS, 1)
    peer = max(tokens // 2, min(tokens, limits.max_session_tokens))
    sessions = limits.max_sessions
    return AdmissionLimits(
        sessions=Cap(
            peer=min(limits.max_sessions_per_peer, sessions),
            group=max(min(limits.max_sessions_per_peer, sessions), sessions * 3 // 4),
            total=sessions,
        ),
        leased_tokens=Cap(peer=peer, group=3 * tokens, total=4 * tokens),
    )


def _expect_nothing(message: wire.AnyMessage) -> None:
    raise RemoteProtocolError(f"the next hop sent {type(message).__name__} up the stream")


def _out_of_bounds(what: str, value: str, bound: str) -> Unsupported:
    return Unsupported(f"{what} {value}: this server takes {bound}", value=value, bound=bound)


def _too_many(what: str, value: int, bound: int) -> Overloaded:
    return Overloaded(f"this server holds its {bound} {what} already", value=str(value), bound=str(bound))
