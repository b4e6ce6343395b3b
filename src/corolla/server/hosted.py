"""One session on this server, with everything it holds: state, cache, links, the way out; and its steps at work.

The event loop owns all of it but the cache and what `Push` marks as the device thread's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from corolla.errors import Faulty, Refused, SessionLost
from corolla.ids import PeerId, short
from corolla.models.finite import is_finite
from corolla.net.channel import Channel
from corolla.server.admission import Guest
from corolla.server.push import Push
from corolla.server.runner import SessionCache, SpanRunner
from corolla.server.session import SessionState
from corolla.wire import messages as wire
from corolla.wire.tensors import DType

if TYPE_CHECKING:
    from corolla.server.control import Control

log = logging.getLogger(__name__)

WINDOW_STEPS = 4
"""Steps of one session in the device thread's line; more stay unread in the stream, and slow whoever sends them."""
WINDOW_BYTES = 8 << 20
"""Bytes of a session's steps in that line and unsent on its way out, beyond which no other step is taken: a slow next
hop slows the one before. One step always may, however long."""


@dataclass(slots=True)
class DataLink:
    """One incoming data stream, once it has said which session it belongs to."""

    peer: PeerId
    channel: Channel
    unread: deque[wire.Step] = field(default_factory=deque[wire.Step])
    """Steps that came before their turn: of a route whose Open has not come, or beyond the window."""


@dataclass(slots=True)
class HostedSession:
    """What a session has here. `links` are the streams that its upstream and its client have opened to us."""

    state: SessionState
    control: "Control"
    guest: Guest
    runner: SpanRunner
    """The blocks that it was opened on; a server that moves has others for new sessions."""
    start: int
    stop: int
    wire_dtype: DType
    want: wire.Want
    asked: wire.Open
    """The newest, which it follows as soon as it has cache."""
    next: PeerId | None
    last_used: float
    push: Push = field(default_factory=Push)
    links: dict[PeerId, DataLink] = field(default_factory=dict[PeerId, DataLink])
    onward: Channel | None = None
    """The stream that we opened to `next`."""
    cache: SessionCache | None = None
    accepted: int = 0
    finished: int = 0
    accepted_bytes: int = 0
    finished_bytes: int = 0
    """Jobs taken and done, and their hidden states; each has one writer, the loop and the device thread."""
    awaits_replay: bool = False
    is_on_route: bool = False
    """False while a new route is being taken: its steps wait, or they would run on what the old one left."""
    is_standby: bool = False
    awaits_room: bool = False
    """Somebody looks whether its outbox has room again."""
    aside: dict[PeerId, Channel] = field(default_factory=dict[PeerId, Channel])
    """Streams to peers that stand by to become `next`."""
    wanted_replays: dict[bool, wire.Replay] = field(default_factory=dict[bool, wire.Replay])
    """What the client asked for last, to the next hop (False) and beside the route (True), and is not begun."""
    replaying: set[bool] = field(default_factory=set[bool])
    """Of the two, those that are being sent."""
    dialling: set[PeerId] = field(default_factory=set[PeerId])
    """Next hops to which a stream is on its way: a second one would end the first there, and be ended here."""
    reached_next: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_cleared: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nothing of it is held any more."""
    end_reason: str = ""
    is_clients_end: bool = False
    """The client knows that it is over: nothing has to be said to it."""

    key: int = field(init=False)
    """Its name in the device thread's line."""

    def __post_init__(self) -> None:
        self.key = id(self)

    @property
    def is_full(self) -> bool:
        return self.accepted - self.finished >= WINDOW_STEPS

    @property
    def is_clogged(self) -> bool:
        """What it was given is not computed yet, or does not get away."""
        return self.accepted_bytes - self.finished_bytes + self.push.unsent_bytes > WINDOW_BYTES

    @property
    def takes_steps(self) -> bool:
        return self.is_on_route and not self.is_full and not self.is_clogged and not self.ended.is_set()

    @property
    def upstream_link(self) -> DataLink | None:
        return self.links.get(self.state.upstream)

    def end(self, reason: str, *, by_client: bool = False) -> None:
        if not self.ended.is_set():
            self.end_reason, self.is_clients_end = reason, by_client
            self.ended.set()

    def take_route(self, ask: wire.Open) -> int:
        """On the device thread, after the steps of the old route: the way out follows the new one.

        The position from which the journal can replay.
        """
        push = self.push
        push.is_tail, push.route_version, push.replay_on = ask.next is None, ask.route_version, ask.replay_on
        push.drop_held_replays()
        if ask.is_fresh:
            push.reset(exact=ask.exact)
            self.cache = self.runner.new_cache(self.start, self.stop, self.state.max_tokens)
        if ask.hold:
            push.hold()
        else:
            push.stop_holding()
        return push.journal_from

    def close_links(self, *, keep_clients: bool = False) -> None:
        """`keep_clients`: those that the client opened stay for now."""
        for link in self.links.values():
            if not (keep_clients and link.peer == self.state.owner):
                link.channel.close()
        for channel in (self.onward, *self.aside.values()):
            if channel is not None:
                channel.close()


@dataclass(slots=True)
class StepJob:
    """One step on its way through the device thread; sends on what it gives."""

    session: HostedSession
    step: wire.Step
    new_tokens: int
    on_done: Callable[["StepJob"], None]
    """Called on the device thread when the step is over, however it went."""
    on_failed: Callable[["StepJob", Refused], None]
    clock: Callable[[], float]
    arrived: float = field(init=False)
    queue_s: float = 0.0
    """How long it stood in line."""
    compute_s: float = 0.0
    """How long the blocks took; 0 before they ran."""
    send_s: float = 0.0
    """From then until the network had the result: looking through it, journal, packing, writing; 0 before it did."""

    # What the scheduler asks for, several times each: read off once.
    session_key: int = field(init=False)
    guest_key: PeerId = field(init=False)
    group_key: str = field(init=False)
    is_listed: bool = field(init=False)
    num_tokens: int = field(init=False)
    is_prefill: bool = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = self.clock()
        guest = self.session.guest
        self.session_key, self.guest_key, self.is_listed = self.session.key, guest.peer, guest.is_listed
        self.group_key = guest.group or guest.peer
        self.num_tokens = self.new_tokens * self.step.hidden.shape[0]
        self.is_prefill = self.new_tokens > 1

    def run(self) -> None:
        try:
            if self.session.cache is not None:  # else the session ended while the step waited in line
                self._compute(self.session.cache)
        except Refused as refused:  # the family's state cannot be brought back, say
            self.on_failed(self, refused)
        except Exception as failure:
            log.exception("a step failed", extra={"peer": short(self.session.state.owner)})
            kind = type(failure).__name__
            self.on_failed(self, SessionLost(f"the step failed on the server ({kind}); the session is lost"))
        finally:
            self.session.finished += 1
            self.session.finished_bytes += self.step.hidden.nbytes
            self.on_done(self)

    def _compute(self, cache: SessionCache) -> None:
        session, step, push = self.session, self.step, self.session.push
        want = self._want()
        started = self.clock()
        self.queue_s = started - self.arrived
        hidden = session.runner.run(cache, step, want, session.wire_dtype)
        done = self.clock()
        self.compute_s = done - started
        if hidden is not None and not is_finite(hidden):
            raise Faulty(f"our blocks gave NaN or infinity in step {step.step_no}, though what came was finite")
        timings = [*step.timings, wire.HopTiming(self.queue_s, self.compute_s, push.send_s)]
        position = step.position + self.new_tokens
        if push.is_tail:
            push.skip(position)
            output = wire.Output(step_no=step.step_no, position=position, hidden=hidden, timings=timings)
            if not step.replay:
                push.answer(output)
            elif want != "none":
                push.pass_back(replace(output, replay=True))
        else:
            assert hidden is not None
            push.onward(replace(step, hidden=hidden, timings=timings))
        self.send_s = push.send_s = self.clock() - done

    def _want(self) -> wire.Want:
        if not self.session.push.is_tail:
            return "all"  # the next hop needs every position
        return self.step.want or self.session.want
