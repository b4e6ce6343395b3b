"""Gives the places of a route that was just taken what they lack, from journals.

    a fresh place       its history: from the journal of the server before it, or from ours where we feed it
    one that stood by   the rest of its history, from where it got to
    one that missed     the live steps that the route carried before it was taken, as they were
    the tail            live steps whose outputs were under way to us, and are lost

Who lacks what is decided in `client/recovery.py`; here it is ordered from servers (`Replay`), or pushed by ourselves.
"""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from corolla.client.hop import Hop
from corolla.client.recovery import Held, Place, plan_resends
from corolla.client.segments import Segments
from corolla.client.steps import Steps
from corolla.ids import PeerId, SessionId
from corolla.wire import messages as wire

PACED_BYTES = 4 << 20
PACE_S = 0.002
"""A replay waits while more than this is unsent, and looks again so often."""
NOTHING_LIVE = 1 << 60
"""As `live_from`: all is history."""


class Replays:
    """One session's. `route_version` is that of the route the hops have taken."""

    def __init__(self, session: SessionId, steps: Steps, segments: Segments) -> None:
        self._session = session
        self._steps = steps
        self._segments = segments

    async def resend(
        self, hops: Sequence[Hop], places: Sequence[Place], held: Sequence[Held], *, route_version: int, live_from: int
    ) -> None:
        """Give every place what it lacks: history to the fresh ones, live steps to those that missed them."""
        segments = self._segments
        in_chunks = all(hop.takes_chunks for hop in hops)  # what one takes may go on to the next
        segments.begin_refeeding(places, last_answered=live_from - 1)
        for resend in plan_resends(places, held, segments.heads):
            self.order(
                hops[resend.index], from_position=resend.from_position, from_step=resend.from_step,
                route_version=route_version, live_from=live_from, in_chunks=in_chunks,
            )  # fmt: skip
        for head, journal in segments.heads.items():
            if segments.is_refed(head):
                continue
            index = next(index for index, place in enumerate(places) if place.start == head)
            tail = segments.tail_of(head, hops)
            if places[index].is_fresh or places[index].catches_up:
                await self.replay_to(
                    hops[index], route_version=route_version, live_from=live_from, from_position=held[index].position,
                    in_chunks=in_chunks,
                )  # fmt: skip
            else:
                for step in journal.recent(held[index].last_step_no + 1):
                    self._push_again(hops[index], step, route_version)
            here = [no for no, pending in self._steps.pending.items() if pending.is_live and pending.at == head]
            if here and not places[tail].is_fresh and held[tail].last_step_no >= min(here):
                self.order(hops[tail], from_step=min(here), route_version=route_version, live_from=live_from)

    def order(
        self, hop: Hop, *, route_version: int, from_position: int | None = None, from_step: int = 0,
        live_from: int = NOTHING_LIVE, to: PeerId | None = None, in_chunks: bool = True,
    ) -> None:  # fmt: skip
        """Tell a server to push on what it kept. `to`: to one that stands by, and not to the next of the route."""
        hop.replay(
            wire.Replay(
                session=self._session, route_version=route_version, from_position=from_position, from_step=from_step,
                live_from=live_from, to=to, in_chunks=in_chunks,
            )
        )  # fmt: skip

    async def replay_to(
        self, hop: Hop, *, route_version: int, in_chunks: bool, live_from: int = NOTHING_LIVE, from_position: int = 0
    ) -> None:
        """Build a head's cache, from this position on, from our own journal."""
        opened, journal = hop.opened, self._segments.heads[hop.start]
        assert opened is not None
        journal.compact()
        steps = [
            *journal.replay(from_position, opened.max_chunk_tokens, opened.window_bytes, in_chunks=in_chunks),
        ]
        steps += [
            replace(step, replay=step.step_no < live_from)
            for step in journal.recent(0)
            if step.position + step.hidden.shape[1] > from_position
        ]
        if hop.start == 0:
            steps = self._segments.begin_replay(steps)
        for step in steps:
            while hop.pending_bytes > PACED_BYTES and hop.error is None:  # noqa: ASYNC110 - nobody tells us of room
                await asyncio.sleep(PACE_S)
            self._push_again(hop, step, route_version)

    def _push_again(self, hop: Hop, step: wire.Step, route_version: int) -> None:
        """Borders may have come or gone since it was first pushed: what is wanted of a live step changes with them."""
        pending = None if step.replay else self._steps.pending.get(step.step_no)
        want = step.want if pending is None else self._segments.want_at(pending, hop.start)
        hop.push(replace(step, want=want, route_version=route_version))
