"""Clients' control streams: what each asks of its sessions, and whether it still lives."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from corolla.errors import HopFailed, RemoteProtocolError, SwarmError
from corolla.ids import PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness, PeerLife, keep_alive
from corolla.net.streams import ByteStream
from corolla.server.hosted import HostedSession
from corolla.server.tasks import Tasks
from corolla.wire import messages as wire

log = logging.getLogger(__name__)

MAX_CONTROL_STREAMS_PER_PEER = 4


class Sessions(Protocol):
    """Who carries out what clients ask."""

    def open_session(self, control: "Control", ask: wire.Open) -> None: ...

    def start_replay(self, session: HostedSession, ask: wire.Replay) -> None: ...


class Control:
    """One client's control stream and the sessions opened on it; they end with it."""

    def __init__(
        self,
        stream: ByteStream,
        sessions: Sessions,
        liveness: Liveness,
        *,
        queue_s: Callable[[], float],
        on_closed: Callable[["Control"], None],
    ) -> None:
        self.peer = stream.peer
        self._sessions = sessions
        self._mine: list[HostedSession] = []
        self._tell_closed = on_closed
        self.channel = Channel(stream, we_dialed=False, on_message=self._on_message, on_closed=self._on_closed)
        self.life = PeerLife(self.channel, liveness, queue_s=queue_s)

    def add(self, session: HostedSession) -> None:
        self._mine.append(session)

    def forget(self, session: HostedSession) -> None:
        if session in self._mine:
            self._mine.remove(session)

    async def watch(self) -> None:
        """A client that has gone silent gives its sessions back."""
        try:
            await keep_alive(self.life)
        except HopFailed as lost:
            log.info("client lost", extra={"peer": short(self.peer), "reason": lost.reason})
            self.channel.close()

    def _on_message(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Open():
                self._sessions.open_session(self, message)
            case wire.Replay():
                if (session := self._session(message.session)) is not None:
                    self._sessions.start_replay(session, message)
            case wire.Close():
                if (session := self._session(message.session)) is not None:
                    session.end("closed by the client", by_client=True)
            case wire.Heartbeat():
                self.life.on_heartbeat(message)
            case _:
                raise RemoteProtocolError(f"a client sent {type(message).__name__} on its control stream")

    def _session(self, which: SessionId) -> HostedSession | None:
        return next((session for session in self._mine if session.state.session == which), None)

    def _on_closed(self, _error: SwarmError | None) -> None:
        self._tell_closed(self)
        for session in self._mine:
            session.end("the client's control stream ended", by_client=True)


class Controls:
    """All control streams of one server."""

    def __init__(self, sessions: Sessions, liveness: Liveness, tasks: Tasks, queue_s: Callable[[], float]) -> None:
        self._sessions = sessions
        self._liveness = liveness
        self._tasks = tasks
        self._queue_s = queue_s
        self._by_peer: dict[PeerId, list[Control]] = {}
        self._watches: dict[Control, asyncio.Task[None]] = {}

    def accept(self, stream: ByteStream) -> None:
        """Serve a client's control stream for as long as it lasts."""
        mine = self._by_peer.setdefault(stream.peer, [])
        if len(mine) >= MAX_CONTROL_STREAMS_PER_PEER:
            stream.close()
            return
        control = Control(stream, self._sessions, self._liveness, queue_s=self._queue_s, on_closed=self._closed)
        mine.append(control)
        self._watches[control] = self._tasks.spawn(control.watch(), is_watch=True)

    def __len__(self) -> int:
        return len(self._watches)

    def say_drain(self, deadline_s: float) -> None:
        for control in self._all():
            control.channel.send(wire.Drain(deadline_s=deadline_s))

    def close(self) -> None:
        for control in self._all():
            control.channel.close()

    def _closed(self, control: Control) -> None:
        self._watches.pop(control).cancel()
        mine = self._by_peer.get(control.peer, [])
        if control in mine:
            mine.remove(control)
        if not mine:
            self._by_peer.pop(control.peer, None)

    def _all(self) -> list[Control]:
        return [control for mine in self._by_peer.values() for control in mine]
