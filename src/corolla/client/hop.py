"""One server of a route, as the client holds it: its control stream, and one session's place there.

A `ServerLink` (control) is shared by all sessions with that server and tells a silent server from a slow one. A
`Hop` opens and re-routes one session there, and where the client is its neighbour pushes steps and hears outputs.
Whatever goes wrong comes out typed, once, through `Listener.on_fault`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from corolla.errors import HopFailed, LinkDown, NetworkLost, RemoteProtocolError, SessionLost, SwarmError, refusal
from corolla.ids import Fingerprint, PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness, PeerLife, keep_alive
from corolla.net.streams import ByteStream, Transport
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

log = logging.getLogger(__name__)

IDLE_LINK_S = 120.0
"""A stream that no session needs is kept for so long: the next one begins without a dial. Longer, every server that was
ever used would be asked for signs of life for good."""
AWAIT_SIGN_S = 60.0
"""How long the stream to a server that fell silent is listened to: if it speaks again, it was called dead wrongly."""


Blocks = tuple[Fingerprint, int, int]
"""Of which model, from where to where."""


@dataclass(frozen=True, slots=True)
class HopLimits:
    """The waits of one hop, in seconds."""

    dial_timeout_s: float
    open_timeout_s: float


class Listener(Protocol):
    """The session that a hop belongs to."""

    def on_output(self, hop: "Hop", output: wire.Output) -> None: ...

    def on_fault(self, hop: "Hop", error: SwarmError) -> None:
        """The hop is lost (`hop.error` is set), or says that a step or a link of it failed."""
        ...

    def on_drain(self, hop: "Hop", deadline_s: float) -> None: ...

    def on_progress(self, hop: "Hop") -> None:
        """A hop that stands by has come further: see `hop.opened`."""
        ...

    def on_false_alarm(self, hop: "Hop") -> None:
        """A hop that was lost because its server fell silent: that server lives."""
        ...


class ServerLink:
    """The control stream to one server; ends everything that hangs on it when the server is lost."""

    def __init__(
        self,
        transport: Transport,
        peer: PeerId,
        limits: HopLimits,
        liveness: Liveness,
        on_heartbeat: Callable[[PeerId, PeerLife], None] = lambda _peer, _life: None,
        on_false_alarm: Callable[[PeerId], None] = lambda _peer: None,
    ) -> None:
        """`on_heartbeat`: what heartbeats tell of the server's line and of the way to it, each time.

        `on_false_alarm`: a server that had been called dead was heard.
        """
        self.peer = peer
        self.transport = transport
        self.limits = limits
        self.error: SwarmError | None = None
        self._liveness = liveness
        self._on_heartbeat = on_heartbeat
        self._on_false_alarm = on_false_alarm
        self._fallen_silent: list[Hop] = []
        """Those that were lost because nothing was heard."""
        self._hops: dict[SessionId, Hop] = {}
        self._watch: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._life: PeerLife | None = None
        self._idle_end: asyncio.TimerHandle | None = None
        """While no session needs the stream."""
        self._last_opened: tuple[Blocks, wire.Opened] | None = None

    async def connect(self) -> None:
        """Dial the server. Raises HopFailed, or NetworkLost."""
        stream = await self.dial(CONTROL_PROTOCOL)
        self._channel = Channel(stream, we_dialed=True, on_message=self._on_message, on_closed=self._closed)
        self._await_use()
        self._life = PeerLife(self._channel, self._liveness)
        self._watch = asyncio.get_running_loop().create_task(self._keep_alive(self._life))

    async def dial(self, protocol: str) -> ByteStream:
        """A stream to the server. Raises HopFailed; NetworkLost when it is our own side that is gone."""
        try:
            return await self.transport.dial(self.peer, protocol, timeout_s=self.limits.dial_timeout_s)
        except HopFailed as failed:
            if self.transport.lost is not None:
                raise NetworkLost(self.transport.lost) from failed
            raise

    @property
    def life(self) -> PeerLife:
        assert self._life is not None, "connect comes first"
        return self._life

    def terms_for(self, ask: wire.Open) -> wire.Opened | None:
        """What the server said of the last session over the same blocks on this stream, and will say again: its limits,
        and what its blocks need, do not change while it runs. None: it has not said."""
        return self._last_opened[1] if self._last_opened is not None and self._last_opened[0] == _blocks(ask) else None

    def learn_terms(self, ask: wire.Open, opened: wire.Opened) -> None:
        self._last_opened = _blocks(ask), opened

    def add(self, hop: "Hop") -> None:
        if self.error is not None:
            raise self.error
        self._hops[hop.session] = hop
        self._stop_waiting()

    def drop(self, hop: "Hop") -> None:
        """Close one session on the server."""
        if self._hops.get(hop.session) is hop:
            del self._hops[hop.session]
            self.send(wire.Close(session=hop.session))
            if not self._hops and self.error is None:
                self._await_use()

    def send(self, message: wire.AnyMessage) -> None:
        if self.error is None and self._channel is not None:
            self._channel.send(message)

    def close(self) -> None:
        self._lost(HopFailed(self.peer, "closed by this client"))

    def _await_use(self) -> None:
        self._stop_waiting()
        self._idle_end = asyncio.get_running_loop().call_later(IDLE_LINK_S, self.close)

    def _stop_waiting(self) -> None:
        if self._idle_end is not None:
            self._idle_end.cancel()
            self._idle_end = None

    async def _keep_alive(self, life: PeerLife) -> None:
        try:
            await keep_alive(life)
        except HopFailed as silent:
            self._fall_silent(silent)

    def _fall_silent(self, error: HopFailed) -> None:
        """Take leave of the server, but listen: an answer says that it was alive all the time."""
        channel, self._channel = self._channel, None
        self._fallen_silent = list(self._hops.values())
        if channel is not None:
            for hop in self._fallen_silent:
                channel.send(wire.Close(session=hop.session))
            asyncio.get_running_loop().call_later(AWAIT_SIGN_S, channel.close)
        self._lost(error)

    def _closed(self, error: SwarmError | None) -> None:
        self._lost(error or HopFailed(self.peer, "closed by this client"))

    def _on_message(self, message: wire.AnyMessage) -> None:
        if self.error is not None:
            self._raise_false_alarm()
            return
        match message:
            case wire.Opened() | wire.Refused() | wire.Close() | wire.HopLost() | wire.LinkDown():
                if (hop := self._hops.get(message.session)) is not None:
                    hop.hear(message)
            case wire.Heartbeat():
                self.life.on_heartbeat(message)
                self._on_heartbeat(self.peer, self.life)
            case wire.Drain():
                log.info("server leaves", extra={"peer": short(self.peer), "deadline_s": message.deadline_s})
                for hop in list(self._hops.values()):
                    hop.listener.on_drain(hop, message.deadline_s)
            case _:
                raise RemoteProtocolError(f"a server sent {type(message).__name__} on the control stream")

    def _raise_false_alarm(self) -> None:
        hops, self._fallen_silent = self._fallen_silent, []
        if not hops:
            return
        log.warning("a server called dead is alive", extra={"peer": short(self.peer)})
        self._on_false_alarm(self.peer)
        for hop in hops:
            hop.listener.on_false_alarm(hop)

    def _lost(self, error: SwarmError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._stop_waiting()
        if self._watch is not None:
            self._watch.cancel()
        if self._channel is not None:
            self._channel.close()
        hops, self._hops = list(self._hops.values()), {}
        for hop in hops:
            hop.fail(error)


def _blocks(ask: wire.Open) -> Blocks:
    return ask.fingerprint, ask.start, ask.end


class Hop:
    """One session on one server. `end` is exclusive."""

    def __init__(self, link: ServerLink, session: SessionId, start: int, end: int, listener: Listener) -> None:
        self.link = link
        self.peer = link.peer
        self.session = session
        self.start = start
        self.end = end
        self.listener = listener
        self.opened: wire.Opened | None = None
        self.terms: wire.Opened | None = None
        """What the server takes: `opened`, or before that what it said of an earlier session; None: not known."""
        self.error: SwarmError | None = None
        self._route_version = 0
        self._answer: asyncio.Future[wire.Opened] | None = None
        self._data: Channel | None = None

    async def open(self, ask: wire.Open) -> wire.Opened:
        """Open the session there, or put it on a new route. Raises Refused or HopFailed."""
        self._raise_if_lost()
        self.link.add(self)
        self._route_version = ask.route_version
        self._answer = asyncio.get_running_loop().create_future()
        self.terms = self.link.terms_for(ask)
        try:
            self.link.send(ask)
            async with asyncio.timeout(self.link.limits.open_timeout_s):
                self.opened = self.terms = await self._answer
            self.link.learn_terms(ask, self.opened)
        except TimeoutError:
            raise HopFailed(self.peer, f"no answer to Open within {self.link.limits.open_timeout_s:g} s") from None
        finally:
            self._answer = None
        return self.opened

    async def connect(self) -> None:
        """Open our data stream to it: where we push steps, or hear outputs. Raises HopFailed, or NetworkLost."""
        self._raise_if_lost()
        if self._data is not None and self._data.is_open:
            return
        stream = await self.link.dial(DATA_PROTOCOL)
        if self.error is not None:
            stream.close()
            raise self.error
        channel = Channel(stream, we_dialed=True, on_message=self._on_data, on_closed=self._data_closed)
        self._data = channel
        self.link.life.include(channel)
        channel.send(wire.Attach(session=self.session, route_version=self._route_version))

    @property
    def takes_chunks(self) -> bool:
        """Whether its state is exact when several positions come onto it at once."""
        return self.terms is None or self.terms.prefill_in_chunks

    def push(self, step: wire.Step) -> None:
        """Send a step; a hop that is lost swallows it, and has said so."""
        if self._data is not None:
            self._data.send(step)

    @property
    def pending_bytes(self) -> int:
        return 0 if self._data is None else self._data.pending_bytes

    def replay(self, order: wire.Replay) -> None:
        self.link.send(order)

    def close(self) -> None:
        """Give the session's place on the server back."""
        self.link.drop(self)
        self._end(SessionLost("the session was closed"))

    def fail(self, error: SwarmError) -> None:
        """The hop is lost; the session is told, once."""
        if self.error is None:
            self._end(error)
            self.listener.on_fault(self, error)

    def hear(self, message: wire.Opened | wire.Refused | wire.Close | wire.HopLost | wire.LinkDown) -> None:
        """A control message about this session."""
        match message:
            case wire.Opened():
                is_asked = self._answer is not None and not self._answer.done()
                if message.route_version != self._route_version:
                    return
                if self._answer is not None and is_asked:
                    self._answer.set_result(message)
                else:
                    self.opened = message
                    self.listener.on_progress(self)
            case wire.Refused():
                self._refused(message)
            case wire.Close():
                self.fail(SessionLost(f"server {self.peer} dropped the session: {message.text}"))
            case wire.HopLost() | wire.LinkDown():
                if message.route_version == self._route_version:
                    text = message.text if isinstance(message, wire.LinkDown) else "its stream to the next server ended"
                    self.listener.on_fault(self, LinkDown(message.peer, text))

    def _refused(self, message: wire.Refused) -> None:
        error = refusal(message.code, message.text, value=message.value, bound=message.bound)
        if message.step_no is not None:
            if message.route_version == self._route_version:
                self.listener.on_fault(self, error)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _raise_if_lost(self) -> None:
        if self.error is not None:
            raise self.error
        if self.link.error is not None:
            raise self.link.error

    def _end(self, error: SwarmError) -> None:
        self.error = error
        if self._data is not None:
            self._data.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _data_closed(self, error: SwarmError | None) -> None:
        if error is not None and self.error is None:
            self.link.drop(self)
            self.fail(error)

    def _on_data(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Output():
                self.listener.on_output(self, message)
            case wire.Refused():
                self._refused(message)
            case _:
                raise RemoteProtocolError(f"a server sent {type(message).__name__} on a data stream")
