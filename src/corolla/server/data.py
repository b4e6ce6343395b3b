"""Incoming data streams: each says which session it belongs to, and then brings that session's steps.

It may come before the session is opened here: what follows is left unread until then, for a bounded time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from corolla.errors import RemoteProtocolError, SwarmError
from corolla.ids import PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.streams import ByteStream
from corolla.server.config import SessionLimits
from corolla.server.hosted import DataLink, HostedSession
from corolla.server.routes import Routes
from corolla.server.steps import Steps
from corolla.wire import messages as wire

log = logging.getLogger(__name__)


class DataStreams:
    """All incoming data streams of one server, and which session each belongs to."""

    def __init__(
        self, limits: SessionLimits, sessions: Callable[[], Iterable[HostedSession]], routes: Routes, steps: Steps,
        saw_inflow: Callable[[PeerId, float], None],
    ) -> None:  # fmt: skip
        """`saw_inflow`: told at how many bytes a second large messages come from a peer."""
        self._limits = limits
        self._sessions = sessions
        self._routes = routes
        self._steps = steps
        self.saw_inflow = saw_inflow
        self._streams: dict[DataStream, None] = {}
        """A dict for its order: in a simulation they are closed alike each time."""

    def accept(self, stream: ByteStream) -> None:
        mine = sum(1 for other in self._streams if other.peer == stream.peer)
        if mine >= self._limits.max_sessions:
            stream.close()
            return
        self._streams[DataStream(self, stream, attach_timeout_s=self._limits.attach_timeout_s)] = None

    def match(self, session: HostedSession) -> None:
        """Give the session, on its new route, the streams that wait for it. Those of former neighbours end."""
        for peer, link in list(session.links.items()):
            if peer not in (session.state.owner, session.state.upstream):
                link.channel.close()
        for stream in list(self._streams):
            stream.match(session)

    def close(self) -> None:
        for stream in list(self._streams):
            stream.channel.close()

    # --- what streams report

    def asked(self, stream: "DataStream") -> None:
        """The stream has said which session it wants; that may be open already."""
        for session in self._sessions():
            if session.cache is not None:
                stream.match(session)

    def is_in_line(self, stream: "DataStream") -> bool:
        """The stream's session waits for cache: that takes as long as it may, and is not the stream's fault."""
        return any(session.cache is None and stream.belongs_to(session) for session in self._sessions())

    def attach(self, stream: "DataStream", session: HostedSession) -> DataLink:
        """The session has a link more, in place of an older one of the same peer."""
        link = DataLink(stream.peer, stream.channel)
        older = session.links.pop(stream.peer, None)
        session.links[stream.peer] = link
        if older is not None:
            older.channel.close()  # its peer dialled again: the older stream is dead to it
        if stream.peer == session.state.owner:  # what another server sends says nothing of the client
            session.control.life.include(stream.channel)
        self._routes.take_back_link(session)
        return link

    def take(self, session: HostedSession, link: DataLink, step: wire.Step) -> None:
        self._steps.take(session, link, step)

    def closed(self, stream: "DataStream") -> None:
        self._streams.pop(stream, None)
        if stream.attached is None:
            return
        session, link = stream.attached
        self._steps.forget(session, link)
        if session.links.get(link.peer) is link:
            del session.links[link.peer]
            if session.push.channel is link.channel:
                session.push.channel = None


class DataStream:
    """One incoming data stream."""

    def __init__(self, streams: DataStreams, stream: ByteStream, *, attach_timeout_s: float) -> None:
        self.peer = stream.peer
        self.attached: tuple[HostedSession, DataLink] | None = None
        self._streams = streams
        self._asked: SessionId | None = None
        self._early: list[wire.Step] = []
        """Steps that came before their session was opened; reading is paused meanwhile."""
        self.channel = Channel(
            stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed,
            on_inflow=partial(streams.saw_inflow, stream.peer),
        )  # fmt: skip
        self._attach_timeout_s = attach_timeout_s
        self._deadline = asyncio.get_running_loop().call_later(attach_timeout_s, self._give_up)

    def belongs_to(self, session: HostedSession) -> bool:
        """Whether it has asked for this session, as one of its neighbours."""
        state = session.state
        return self._asked == state.session and self.peer in (state.owner, state.upstream)

    def match(self, session: HostedSession) -> None:
        """Belong to this session, if it is the one that was asked for and this peer is one of its neighbours."""
        if self.attached is not None or not self.belongs_to(session):
            return
        self._deadline.cancel()
        link = self._streams.attach(self, session)
        self.attached = session, link
        early, self._early = self._early, []
        self.channel.resume()
        for step in early:
            self._streams.take(session, link, step)

    def _on_message(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Step) and self._asked is not None:
            if self.attached is None:
                self._early.append(message)
            else:
                self._streams.take(*self.attached, message)
        elif isinstance(message, wire.Attach) and self._asked is None:
            self._asked = message.session
            self._streams.asked(self)
            if self.attached is None:
                self.channel.pause()
        else:
            raise RemoteProtocolError(f"{type(message).__name__} does not belong here on a data stream")

    def _give_up(self) -> None:
        """The session was never opened here, or is another peer's: its client will have moved on."""
        if self._streams.is_in_line(self):
            self._deadline = asyncio.get_running_loop().call_later(self._attach_timeout_s, self._give_up)
            return
        log.info("data stream of no session", extra={"peer": short(self.peer), "asked": self._asked is not None})
        self.channel.close()

    def _on_closed(self, _error: SwarmError | None) -> None:
        self._deadline.cancel()
        self._streams.closed(self)
