"""What a server says to its clients on their control streams, and counts while it does."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from corolla.errors import Refused
from corolla.ids import PeerId, SessionId, short
from corolla.net.channel import Channel
from corolla.server.config import SessionLimits
from corolla.server.hosted import HostedSession
from corolla.wire import messages as wire

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerCounters:
    """What the server has done since it started; for logs, status and metrics."""

    steps: int = 0
    tokens: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    sessions_opened: int = 0
    links_down: int = 0
    announcements_rejected: Counter[str] = field(default_factory=Counter[str])
    """Of others, by reason; the watcher counts them."""


class Replies:
    """The server's own messages about its sessions. `refuse` may be called from any thread."""

    def __init__(self, limits: SessionLimits, counters: ServerCounters) -> None:
        self._limits = limits
        self._counters = counters

    def opened(self, session: HostedSession, journal_from: int) -> None:
        """The session is on its route, and this is what is held of it."""
        facts = session.runner.facts
        session.control.channel.send(
            wire.Opened(
                session=session.state.session,
                route_version=session.state.route_version,
                cached_tokens=session.state.position,
                last_step_no=session.state.last_step_no,
                journal_from=journal_from,
                max_chunk_tokens=self._limits.max_chunk_tokens,
                window_bytes=self._limits.max_chunk_bytes,
                prefill_in_chunks=facts.prefill_in_chunks,
                needs_token_ids=facts.needs_token_ids,
            )
        )

    def refuse_open(self, channel: Channel, ask: wire.Open, refused: Refused) -> None:
        self._refuse(channel, ask.session, refused, step_no=None, route_version=ask.route_version)

    def refuse_step(self, session: HostedSession, step: wire.Step, refused: Refused) -> None:
        self._refuse(
            session.control.channel, session.state.session, refused,
            step_no=step.step_no, route_version=step.route_version,
        )  # fmt: skip

    def hop_lost(self, session: HostedSession, peer: PeerId) -> None:
        """Our stream to the next hop has ended."""
        state = session.state
        session.control.channel.send(
            wire.HopLost(session=state.session, route_version=state.route_version, peer=peer, step_no=None)
        )

    def link_down(self, session: HostedSession, peer: PeerId, reason: str, *, stands_by: bool = False) -> None:
        """We cannot reach a peer that we were sent to; of use to the client while that is still the next hop, or is to
        become it."""
        self._counters.links_down += 1
        if (stands_by or session.next == peer) and not session.ended.is_set():
            state = session.state
            session.control.channel.send(
                wire.LinkDown(session=state.session, route_version=state.route_version, peer=peer, text=reason[:1024])
            )

    def _refuse(
        self, channel: Channel, session: SessionId, refused: Refused, *, step_no: int | None, route_version: int
    ) -> None:
        refusals = self._counters.refusals
        refusals[refused.code] = refusals.get(refused.code, 0) + 1
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
