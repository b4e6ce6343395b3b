"""The ring: which server has which place, and how a route is taken so that every place has what it needs.

A route is a list of places, linked server to server; at some borders the client stands between two servers that
cannot reach each other. Taking a route puts all of them under a new version (`Open`), hears what each holds, and has
what is missing sent (`client/replays.py`): history to those that begin afresh, live steps to those that missed them.
What is decided lies in `client/recovery.py`; when and why is `client/session.py`'s.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from corolla.client.access import SwarmAccess
from corolla.client.doubts import Doubt, after_parting, may_try
from corolla.client.hop import Hop, Listener, ServerLink
from corolla.client.outcomes import MAY_DO_ELSEWHERE, PlacesFailed, all_or_failed
from corolla.client.recovery import Held, Place, WrongAnswer, mark_fresh, must_rebuild
from corolla.client.replays import Replays
from corolla.client.router import ServedModel
from corolla.client.segments import Segments
from corolla.client.steps import Pending, Steps
from corolla.clock import loop_time
from corolla.errors import (
    HopFailed,
    JournalGap,
    OutOfOrder,
    SessionLost,
    SwarmError,
    Unsupported,
)
from corolla.ids import PeerId, new_session_id
from corolla.models.finite import is_finite
from corolla.wire import messages as wire
from corolla.wire.journal import Journal
from corolla.wire.tensors import DType, WireTensor

log = logging.getLogger(__name__)


class Ring:
    """One session's servers, in the order of their blocks. Belongs to one loop; who calls `take` has it alone."""

    def __init__(
        self,
        swarm: SwarmAccess,
        model: ServedModel,
        listener: Listener,
        steps: Steps,
        *,
        max_tokens: int,
        max_rows: int,
        wire_dtype: DType,
        exact: bool = False,
    ) -> None:
        self.places: list[Place] = []
        self.hops: list[Hop] = []
        """One for each place."""
        self.version = -1
        """Of the route: counts how often one was tried."""
        self.num_taken = 0
        """Routes that were taken, the first one included."""
        self.doubts: dict[tuple[PeerId, PeerId], Doubt] = {}
        """Of links of this route that one of its servers could not use."""
        self._exact = exact
        self._longest_step = 0
        """Positions × rows of the longest step so far."""
        self.segments = Segments(steps, exact=exact)
        self.standby: dict[PeerId, Hop] = {}
        """Servers that are built up beside the route."""
        self.progress = asyncio.Event()
        """Set when one of those has come further."""
        self.on_head_reached: Callable[[], None] | None = None
        """Called while the first route is being opened, as soon as steps can be pushed to its head: if all of its
        servers have said before what they take, nothing has to wait for `Opened`."""
        self._swarm = swarm
        self._model = model
        self._listener = listener
        self._session = new_session_id()
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._wire_dtype: DType = wire_dtype
        self._steps = steps
        self._replays = Replays(self._session, steps, self.segments)
        self._fed: frozenset[int] = frozenset()

    @property
    def heads(self) -> Mapping[int, Journal]:
        """First block of each segment → what the client pushed there."""
        return self.segments.heads

    @property
    def terms(self) -> list[wire.Opened]:
        """What the servers of the route take."""
        return [hop.terms for hop in self.hops if hop.terms is not None]

    def close(self) -> None:
        """Give the session's place on every server back."""
        for hop in (*self.hops, *self.standby.values()):
            hop.close()

    def drop(self, hop: Hop, error: SwarmError) -> None:
        """That server is at fault by our own evidence: leave it."""
        hop.link.drop(hop)
        hop.fail(error)

    # --- steps

    def push(self, pending: Pending, at: int, hidden: WireTensor) -> None:
        """To the head of the segment that begins at block `at`."""
        pending.at = at
        step = replace(
            pending.step, hidden=hidden, want=self.segments.want_at(pending, at), route_version=self.version,
            timings=pending.timings if at else [],
        )  # fmt: skip
        self._longest_step = max(self._longest_step, step.hidden.shape[0] * step.hidden.shape[1])
        self.segments.keep(step, at)
        self.hop_at(at).push(step)

    def hop_at(self, block: int) -> Hop:
        return next(hop for hop in self.hops if hop.start == block)

    def segment_of(self, tail: Hop) -> int | None:
        """First block of the segment that ends with this hop."""
        index = self.hops.index(tail)
        if index + 1 < len(self.hops) and self.hops[index + 1].start not in self.heads:
            return None
        return self.segments.head_of(tail.start)

    @property
    def keeps_all(self) -> bool:
        """Whether the client could have every place built anew."""
        return self.heads[0].covers(self._steps.last_answered)

    @property
    def has_links(self) -> bool:
        """Whether some server pushes on to another."""
        return any(place.start not in self.heads for place in self.places)

    def owing(self) -> Hop | None:
        """The tail of the segment from which the oldest step that is under way has to come."""
        live = next((pending for pending in self._steps.pending.values() if pending.is_live), None)
        return None if live is None else self.hops[self.segments.tail_of(live.at, self.hops)]

    def feeds(self, hop: Hop) -> bool:
        """Whether its steps come from us, and not from another server, on the route that was opened last.

        A segment that has begun there since does not count yet: what it says is still of steps that another sent.
        """
        return hop.start in self._fed

    def has_lost(self, peer: PeerId) -> bool:
        return any(hop.peer == peer and hop.error is not None for hop in self.hops)

    def pushes_to(self, hop: Hop, peer: PeerId) -> bool:
        """Whether that peer is the next place of the route."""
        index = self.hops.index(hop) + 1
        return index < len(self.hops) and self.hops[index].peer == peer

    def server_before(self, hop: Hop) -> PeerId | None:
        """Who pushes on to this hop; None: the client does."""
        return None if self.feeds(hop) else self.hops[self.hops.index(hop) - 1].peer

    def part_at(self, start: int, *, on_suspicion: bool = False) -> None:
        """From now on the client passes on what comes to this block; what came before was not kept.

        `on_suspicion`: to see for itself, until one of the two servers is replaced.
        """
        self.segments.part_at(start, self.places, on_suspicion=on_suspicion)

    def part_link(self, index: int) -> None:
        """The link to the place at `index` does not work: stand between, for a while."""
        link = self.places[index - 1].peer, self.places[index].peer
        self.doubts[link] = after_parting(self.doubts.get(link), loop_time())
        self.part_at(self.places[index].start)

    def join_again(self) -> bool:
        """Between two steps: let servers push to each other again that could not for a while. False: there are none,
        or it is too early; True: the route has to be taken anew."""
        now = loop_time()
        starts = [
            following.start
            for place, following in pairwise(self.places)
            if self.segments.is_parted_by_need(following.start)
            and may_try(self.doubts.get((place.peer, following.peer)), now)
        ]
        for start in starts:
            log.info("link is tried again", extra={"block": start})
            self.segments.join_at(start)
        return bool(starts)

    def watch_segment(self, tail: Hop) -> None:
        """Stand between all the servers that an answer has come through: one of them is wrong, and those behind it
        may have taken that in."""
        last, head = self.hops.index(tail), self.segment_of(tail)
        behind = [index for index in range(last + 1) if head is not None and self.places[index].start > head]
        for index in behind:
            self.part_at(self.places[index].start, on_suspicion=True)
        self.places = mark_fresh(self.places, behind)

    def pass_replay_on(self, hop: Hop, output: wire.Output) -> None:
        """From the tail of one segment to the head of the next."""
        if hop not in self.hops or output.hidden is None:
            return
        if not is_finite(output.hidden):
            self.drop(hop, HopFailed(hop.peer, "there is NaN or infinity in its output of a replay"))
            return
        segment = self.segment_of(hop)
        problem = self.segments.flaw_of_replayed(output, segment)
        if problem is not None:
            if self.feeds(hop):
                self.drop(hop, HopFailed(hop.peer, problem))
            else:
                self._listener.on_fault(hop, WrongAnswer(problem))
            return
        if segment is None:
            return
        passed_on = self.segments.passed_on(output, segment, route_version=self.version)
        if passed_on is not None:
            head, step = passed_on
            self.hop_at(head).push(step)

    # --- taking a route

    async def take(self, places: list[Place]) -> None:
        """Put every place on the route, as often as it takes for all to have what they need. Raises PlacesFailed."""
        last_answered = self._steps.last_answered
        self.segments.follow(places)
        while True:
            held = await self._open_all(places)
            whole = {start: journal.covers(last_answered) for start, journal in self.heads.items()}
            rebuilt = must_rebuild(places, held, whole, last_answered)
            if 0 in rebuilt and not whole[0]:
                raise SessionLost(
                    f"the server of block 0 has to be told {self._steps.position} positions again, which this client "
                    "gave up to keep within max_journal_bytes: open another session and send the text again"
                )
            fresh = {index for index, place in enumerate(places) if place.is_fresh}
            if rebuilt == fresh:
                break
            places = mark_fresh(places, rebuilt)
        if self.version > 0:
            await self._replays.resend(self.hops, places, held, route_version=self.version, live_from=last_answered + 1)
        self.places = [Place(place.peer, place.start, place.end) for place in places]
        links = {(place.peer, following.peer) for place, following in pairwise(places)}
        self.doubts = {link: doubt for link, doubt in self.doubts.items() if link in links}
        self.num_taken += 1

    async def build_aside(self, hop: Hop, index: int) -> None:
        """Give a server that stands by what the place at `index` holds, beside the route.

        Raises JournalGap where nobody before that place has kept its history from the start: then no server can.
        """
        position = self._steps.position
        if hop.start in self.heads and not self.heads[hop.start].covers(self._steps.last_answered):
            raise JournalGap("this client has not kept what went to its place from the start")
        ask = self._ask([*self.places[:index], Place(hop.peer, hop.start, hop.end), *self.places[index + 1 :]], index)
        await hop.open(replace(ask, is_fresh=True, standby=True, hold=True))
        if hop.start in self.heads or ask.next is None:
            await hop.connect()  # now, so that no step waits for it when the places are swapped
        if hop.start in self.heads:
            await self._replays.replay_to(hop, route_version=self.version, in_chunks=hop.takes_chunks)
        else:
            self._replays.order(
                self.hops[index - 1], from_position=0, route_version=self.version, to=hop.peer,
                in_chunks=hop.takes_chunks,
            )  # fmt: skip
        while hop.opened is not None and hop.opened.cached_tokens < position:
            self.progress.clear()
            await self.progress.wait()
            if isinstance(hop.error, OutOfOrder) and hop.start not in self.heads:  # what it was sent begins later
                raise JournalGap(f"the server before its place has not kept all: {hop.error}")
            if hop.error is not None:
                raise hop.error

    async def _open_all(self, places: Sequence[Place]) -> list[Held]:
        """All hops at once, under a new route version, and our own streams beside. Raises PlacesFailed, naming all that
        will not."""
        self.version += 1
        hops = all_or_failed(
            places,
            await asyncio.gather(*(self._hop_for(place) for place in places), return_exceptions=True),
        )
        for old in self.hops:
            if old not in hops:
                old.close()
        self.hops = hops
        self.places = list(places)
        self._fed = frozenset(self.heads)
        asks = [self._ask(places, index) for index in range(len(places))]
        ends = self._ends()
        answers, connections = await asyncio.gather(
            asyncio.gather(*(hop.open(ask) for hop, ask in zip(hops, asks, strict=True)), return_exceptions=True),
            asyncio.gather(self._reach_head(ends[0]), *(hop.connect() for hop in ends[1:]), return_exceptions=True),
        )
        for hop, outcome in [*zip(hops, answers, strict=True), *zip(ends, connections, strict=True)]:
            if isinstance(outcome, MAY_DO_ELSEWHERE):
                self.drop(hop, outcome)
        opened_all = all_or_failed(places, answers)
        all_or_failed(ends, connections)
        if self._exact:
            self._check_lengths(places, opened_all)
        return [Held(opened.cached_tokens, opened.last_step_no, opened.journal_from) for opened in opened_all]

    async def _reach_head(self, head: Hop) -> None:
        await head.connect()
        if self.version == 0 and self.on_head_reached is not None and len(self.terms) == len(self.hops):
            self.on_head_reached()

    def _check_lengths(self, places: Sequence[Place], opened_all: Sequence[wire.Opened]) -> None:
        """Steps that were taken once are repeated as they were: a server that takes only shorter ones will not do."""
        short = {
            place.peer: Unsupported(
                f"server {place.peer} takes {opened.max_chunk_tokens} tokens in one step; this exact session has a "
                f"step of {self._longest_step}", value=str(self._longest_step), bound=str(opened.max_chunk_tokens),
            )
            for place, opened in zip(places, opened_all, strict=True)
            if opened.max_chunk_tokens < self._longest_step
        }  # fmt: skip
        for hop in self.hops:
            if hop.peer in short:
                hop.close()
        if short:
            raise PlacesFailed(short, [place.start for place in places if place.peer in short])

    async def _hop_for(self, place: Place) -> Hop:
        """The hop that holds this place already, or a new one. A server that takes other blocks begins afresh."""
        if place.catches_up and place.peer in self.standby:
            return self.standby[place.peer]
        for hop in self.hops:
            if hop.peer == place.peer and hop.error is None:
                hop.start, hop.end = place.start, place.end
                return hop
        link = await self._swarm.link(place.peer)
        return self.new_hop(link, place.start, place.end)

    def _ask(self, places: Sequence[Place], index: int) -> wire.Open:
        place = places[index]
        following = places[index + 1] if index + 1 < len(places) else None
        if following is not None and following.start in self.heads:
            following = None
        feeds_fresh = following is not None and (following.is_fresh or following.catches_up)
        return wire.Open(
            session=self._session,
            route_version=self.version,
            fingerprint=self._model.fingerprint,
            start=place.start,
            end=place.end,
            max_tokens=self._max_tokens,
            max_rows=self._max_rows,
            upstream=self._swarm.own_peer if place.start in self.heads else places[index - 1].peer,
            next=None if following is None else following.peer,
            want="last",
            is_fresh=place.is_fresh,
            hold=feeds_fresh and not place.is_fresh and self.version > 0,
            replay_on=feeds_fresh and place.is_fresh,
            wire_dtype=self._wire_dtype,
            exact=self._exact,
        )

    def _ends(self) -> list[Hop]:
        """Those with which we have a stream: the head of every segment, and its tail."""
        ends = {index for index, hop in enumerate(self.hops) if hop.start in self.heads}
        ends |= {index - 1 for index in ends if index > 0} | {len(self.hops) - 1}
        return [self.hops[index] for index in sorted(ends)]

    def new_hop(self, link: ServerLink, start: int, end: int) -> Hop:
        return Hop(link, self._session, start, end, self._listener)
