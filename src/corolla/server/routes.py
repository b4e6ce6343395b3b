"""A session's place on its route: taking a new one, reaching the next hop, replaying to it what it lacks.

The client alone opens a route; here it is followed. A next hop is dialled by peer id, never by an address, and only
one that is announced for what comes next.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from corolla.errors import HopFailed, RemoteProtocolError, SwarmError
from corolla.ids import PeerId
from corolla.net.channel import Channel
from corolla.net.streams import Transport
from corolla.server.config import SessionLimits
from corolla.server.executor import Executor
from corolla.server.hosted import HostedSession
from corolla.server.push import send_paced
from corolla.server.replies import Replies
from corolla.server.tasks import Tasks
from corolla.wire import messages as wire
from corolla.wire.protocol import DATA_PROTOCOL

MayDial = Callable[[PeerId, int], Awaitable[bool]]
"""Whether a peer is announced for this model, with a span that goes on at this block."""


class Routes:
    """Puts sessions on the routes that their clients open. Belongs to one loop."""

    def __init__(
        self,
        transport: Transport,
        executor: Executor,
        limits: SessionLimits,
        replies: Replies,
        tasks: Tasks,
        *,
        may_dial: MayDial,
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._limits = limits
        self._replies = replies
        self._tasks = tasks
        self._may_dial = may_dial

    async def take(self, session: HostedSession, ask: wire.Open) -> bool:
        """Put the session on the route that `ask` names, and tell the client what is held.

        False: it has ended meanwhile, or another route came.
        """
        if ask.next != session.next:
            session.push.channel = None
            if session.onward is not None:
                session.onward.close()
                session.onward = None
            session.reached_next.clear()
            session.next = ask.next
        session.awaits_replay, session.is_standby = ask.hold, ask.standby
        session.is_on_route = False
        journal_from = await self._executor.call(partial(session.take_route, ask), after=session.key)
        if session.ended.is_set() or session.state.route_version != ask.route_version:
            return False
        session.is_on_route = True
        is_missing = not session.reached_next.is_set() and not ask.standby
        if ask.next is not None and is_missing and ask.next not in session.dialling:
            self._tasks.spawn(self._dial_next(session, ask.next))
        self._replies.opened(session, journal_from)
        return True

    def take_back_link(self, session: HostedSession) -> None:
        """Outputs for the client leave on the stream that it opened to us."""
        link = session.links.get(session.state.owner)
        if session.next is None and link is not None and session.push.channel is not link.channel:
            session.push.channel = link.channel
            self._tasks.spawn(self._release(session))

    def start_replay(self, session: HostedSession, ask: wire.Replay) -> None:
        """Send the next hop, or one that stands by, what it lacks. Of an older route: nobody waits for it.

        A tail has no history to tell: its client would take steps for a fault.
        """
        is_of_a_tail = ask.to is None and session.next is None and ask.from_position is not None
        if ask.route_version != session.state.route_version or is_of_a_tail:
            return
        is_aside = ask.to is not None
        session.wanted_replays[is_aside] = ask
        if is_aside not in session.replaying:
            session.replaying.add(is_aside)
            self._tasks.spawn(self._keep_replaying(session, is_aside=is_aside))

    # --- reaching the next hop

    async def _dial_next(self, session: HostedSession, peer: PeerId) -> None:
        session.dialling.add(peer)
        try:
            channel = session.aside.pop(peer, None) or await self._reach(session, peer)
        except HopFailed as failed:
            self._replies.link_down(session, peer, failed.reason)
            return
        finally:
            session.dialling.discard(peer)
        if session.ended.is_set() or session.next != peer or session.reached_next.is_set():
            channel.close()
            return
        session.onward = session.push.channel = channel
        session.reached_next.set()
        await self._release(session)

    async def _reach(self, session: HostedSession, peer: PeerId) -> Channel:
        """A data stream to a server that goes on where we end. Raises HopFailed.

        Nobody makes us talk to a stranger: a peer that is not announced for that is not dialled.
        """
        if not await self._may_dial(peer, session.stop):
            raise HopFailed(peer, f"it is not announced for block {session.stop} of this model")
        stream = await self._transport.dial(peer, DATA_PROTOCOL, timeout_s=self._limits.dial_timeout_s)
        channel = Channel(
            stream, we_dialed=True, on_message=_expect_nothing, on_closed=partial(self._next_lost, session, peer)
        )
        channel.send(wire.Attach(session=session.state.session, route_version=session.state.route_version))
        return channel

    def _next_lost(self, session: HostedSession, peer: PeerId, error: SwarmError | None) -> None:
        if session.aside.pop(peer, None) is not None and error is not None:
            self._replies.link_down(session, peer, str(error), stands_by=True)
        if error is None or session.next != peer or session.ended.is_set():
            return  # we closed it ourselves, or it only stood by
        session.push.channel = None
        session.reached_next.clear()
        self._replies.hop_lost(session, peer)

    # --- replaying

    async def _keep_replaying(self, session: HostedSession, *, is_aside: bool) -> None:
        """One replay at a time, and of those that were asked for since the newest: each holds a copy of the journal
        while it is sent, and a peer that takes nothing makes that long."""
        try:
            while (ask := session.wanted_replays.pop(is_aside, None)) is not None:
                if ask.to is None:
                    await self._replay(session, ask)
                else:
                    await self._replay_aside(session, ask, ask.to)
        finally:
            session.replaying.discard(is_aside)

    async def _replay(self, session: HostedSession, ask: wire.Replay) -> None:
        """Send the next hop what it lacks; what is computed meanwhile follows in order."""
        if session.next is not None:
            try:
                async with asyncio.timeout(self._limits.dial_timeout_s):
                    await session.reached_next.wait()
            except TimeoutError:
                return  # `LinkDown` was said
        push, channel = session.push, session.push.channel
        if ask.from_position is None:
            await self._executor.call(partial(push.release, ask.from_step, ask.live_from), after=session.key)
        elif channel is not None:
            limits = self._limits
            steps = await self._executor.call(
                partial(push.snapshot, ask.from_position, limits.max_chunk_tokens, limits.max_chunk_bytes,
                        ask.live_from, in_chunks=ask.in_chunks),
                after=session.key,
            )  # fmt: skip
            await send_paced(channel, steps, ask.route_version, is_wanted=lambda: False not in session.wanted_replays)
            if False in session.wanted_replays:
                return  # a newer one: what is held back follows that
            await self._executor.call(push.release, after=session.key)
        session.awaits_replay = False

    async def _replay_aside(self, session: HostedSession, ask: wire.Replay, peer: PeerId) -> None:
        """Build the cache of a peer that stands by, while the route goes on as it is. One stands by at a time."""
        for other in [other for other in session.aside if other != peer]:
            session.aside.pop(other).close()
        try:
            channel = session.aside.get(peer) or await self._reach(session, peer)
        except HopFailed as failed:
            self._replies.link_down(session, peer, failed.reason, stands_by=True)
            return
        if session.ended.is_set() or not channel.is_open:
            channel.close()
            return
        session.aside[peer] = channel
        limits = self._limits
        steps = await self._executor.call(
            partial(session.push.copy, ask.from_position or 0, limits.max_chunk_tokens, limits.max_chunk_bytes,
                    ask.live_from, in_chunks=ask.in_chunks),
            after=session.key,
        )  # fmt: skip
        await send_paced(channel, steps, ask.route_version, is_wanted=lambda: True not in session.wanted_replays)

    async def _release(self, session: HostedSession) -> None:
        if not session.awaits_replay:
            await self._executor.call(session.push.release, after=session.key)


def _expect_nothing(message: wire.AnyMessage) -> None:
    raise RemoteProtocolError(f"the next hop sent {type(message).__name__} up the stream")
