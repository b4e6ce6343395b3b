"""One server of a route, as the client holds it: its control stream, and one data stream per session.

A `ServerLink` (control) is shared by all sessions with that server and tells a silent server from a slow one; a
`Hop` is one session's place there. Whatever goes wrong comes out as one typed error: `Refused` when the server
is well and says no, `HopFailed` when it broke or fell silent. Both end what waits on them at once.
"""

import asyncio
import logging
from dataclasses import dataclass

from corolla.errors import HopFailed, RemoteProtocolError, SessionLost, SwarmError, refusal
from corolla.ids import PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness, PeerLife, keep_alive
from corolla.net.streams import ByteStream, Transport
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HopLimits:
    """The waits of one hop, in seconds."""

    dial_timeout_s: float
    open_timeout_s: float
    step_timeout_s: float


class ServerLink:
    """The control stream to one server; ends everything that hangs on it when the server is lost."""

    def __init__(self, transport: Transport, peer: PeerId, limits: HopLimits, liveness: Liveness) -> None:
        self.peer = peer
        self.transport = transport
        self.limits = limits
        self.error: SwarmError | None = None
        self._liveness = liveness
        self._opening: dict[SessionId, asyncio.Future[wire.Opened]] = {}
        self._hops: dict[SessionId, Hop] = {}
        self._watch: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._life: PeerLife | None = None

    async def connect(self) -> None:
        """Dial the server. Raises HopFailed."""
        stream = await self.transport.dial(self.peer, CONTROL_PROTOCOL, timeout_s=self.limits.dial_timeout_s)
        self._channel = Channel(stream, we_dialed=True, on_message=self._on_message, on_closed=self._closed)
        self._life = PeerLife(self._channel, self._liveness)
        self._watch = asyncio.get_running_loop().create_task(self._keep_alive(self._life))

    @property
    def is_idle(self) -> bool:
        return not self._opening and not self._hops

    async def open(self, ask: wire.Open) -> "Hop":
        """Open a session on the server and its data stream. Raises Refused or HopFailed."""
        channel = self._usable()
        answer: asyncio.Future[wire.Opened] = asyncio.get_running_loop().create_future()
        self._opening[ask.session] = answer
        try:
            channel.send(ask)
            opened = await self._answer(answer)
            stream = await self.transport.dial(self.peer, DATA_PROTOCOL, timeout_s=self.limits.dial_timeout_s)
        except BaseException:
            # The server may have opened it all the same: say that nobody will come.
            channel.send(wire.Close(session=ask.session))
            raise
        finally:
            self._opening.pop(ask.session, None)
        hop = Hop(self, ask, opened)
        hop.attach(stream)
        self._hops[ask.session] = hop
        return hop

    async def _answer(self, answer: "asyncio.Future[wire.Opened]") -> wire.Opened:
        try:
            async with asyncio.timeout(self.limits.open_timeout_s):
                return await answer
        except TimeoutError:
            raise HopFailed(self.peer, f"no answer to Open within {self.limits.open_timeout_s:g} s") from None

    def drop(self, hop: "Hop") -> None:
        """Close one session on the server."""
        self._hops.pop(hop.session, None)
        if self.error is None and self._channel is not None:
            self._channel.send(wire.Close(session=hop.session))

    def close(self) -> None:
        self._lost(HopFailed(self.peer, "closed by this client"))

    def _usable(self) -> Channel:
        if self.error is not None:
            raise self.error
        assert self._channel is not None, "connect comes first"
        return self._channel

    @property
    def life(self) -> PeerLife:
        assert self._life is not None, "connect comes first"
        return self._life

    async def _keep_alive(self, life: PeerLife) -> None:
        try:
            await keep_alive(life)
        except HopFailed as lost:
            self._lost(lost)

    def _closed(self, error: SwarmError | None) -> None:
        self._lost(error or HopFailed(self.peer, "closed by this client"))

    def _on_message(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Opened():
                _settle(self._opening.get(message.session), message)
            case wire.Refused():
                self._refused(message)
            case wire.Close():
                if (hop := self._hops.pop(message.session, None)) is not None:
                    hop.end(SessionLost(f"server {self.peer} dropped the session: {message.text}"))
            case wire.Heartbeat():
                self.life.on_heartbeat(message)
            case wire.Drain():
                log.info("server leaves", extra={"peer": short(self.peer), "deadline_s": message.deadline_s})
            case _:
                raise RemoteProtocolError(f"a server sent {type(message).__name__} on the control stream")

    def _refused(self, message: wire.Refused) -> None:
        error = refusal(message.code, message.text, value=message.value, bound=message.bound)
        if (answer := self._opening.get(message.session)) is not None:
            if not answer.done():
                answer.set_exception(error)
        elif (hop := self._hops.get(message.session)) is not None:
            hop.end(error)

    def _lost(self, error: SwarmError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._watch is not None:
            self._watch.cancel()
        if self._channel is not None:
            self._channel.close()
        for answer in self._opening.values():
            if not answer.done():
                answer.set_exception(error)
        for hop in list(self._hops.values()):
            hop.end(error)
        self._hops.clear()


class Hop:
    """One session on one server: steps go in, outputs come out, in order."""

    def __init__(self, link: ServerLink, ask: wire.Open, opened: wire.Opened) -> None:
        self.link = link
        self.peer = link.peer
        self.session = ask.session
        self.start, self.end_block = ask.start, ask.end
        self.opened = opened
        self.error: SwarmError | None = None
        self._ask = ask
        self._waiting: tuple[int, asyncio.Future[wire.Output]] | None = None
        self._channel: Channel | None = None

    def attach(self, stream: ByteStream) -> None:
        self._channel = Channel(stream, we_dialed=True, on_message=self._on_message, on_closed=self._closed)
        self.link.life.include(self._channel)
        self._channel.send(wire.Attach(session=self.session, route_version=self._ask.route_version))

    async def step(self, step: wire.Step) -> wire.Output:
        """Run one step on the server. Raises Refused or HopFailed; one step at a time."""
        if self.error is not None:
            raise self.error
        assert self._channel is not None, "attach comes first"
        assert self._waiting is None, "steps of a hop do not overlap"
        answer: asyncio.Future[wire.Output] = asyncio.get_running_loop().create_future()
        self._waiting = (step.step_no, answer)
        try:
            self._channel.send(step)
            async with asyncio.timeout(self.link.limits.step_timeout_s):
                return await answer
        except TimeoutError:
            raise HopFailed(self.peer, f"no output within {self.link.limits.step_timeout_s:g} s") from None
        finally:
            self._waiting = None

    def close(self) -> None:
        """Give the session's place on the server back."""
        if self.error is None:
            self.link.drop(self)
        self.end(SessionLost("the session was closed"))

    def _closed(self, error: SwarmError | None) -> None:
        self.end(error or SessionLost("the session was closed"))

    def end(self, error: SwarmError) -> None:
        """Whatever waits on this hop fails now, and so does every later step."""
        if self.error is not None:
            return
        self.error = error
        if self._channel is not None:
            self._channel.close()
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(error)

    def _on_message(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Output():
                if self._waiting is not None and self._waiting[0] == message.step_no:
                    _settle(self._waiting[1], message)
                # else a late answer to a step that was given up: nobody waits for it
            case wire.Refused():
                error = refusal(message.code, message.text, value=message.value, bound=message.bound)
                if self._waiting is not None and message.step_no in (None, self._waiting[0]):
                    if not self._waiting[1].done():
                        self._waiting[1].set_exception(error)
                elif message.step_no is None:
                    self.end(error)
            case _:
                raise RemoteProtocolError(f"a server sent {type(message).__name__} on a data stream")


def _settle(answer: "asyncio.Future[wire.Opened] | asyncio.Future[wire.Output] | None", message: object) -> None:
    if answer is not None and not answer.done():
        answer.set_result(message)  # pyright: ignore[reportArgumentType] - each future gets its own kind
