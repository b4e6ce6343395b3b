"""One generation over a ring of servers, as the client counts it: position, step number, places, route version.

Steps go to the head of the route and come back from its tail; every server pushes on to the next. State moves only
after success: a step that failed half-way is sent again under the same number, and whoever has it already answers
from what it kept. When a server is lost, `client/recovery.py` says who replaces it and who replays what; here it is
carried out under a new route version, while everyone else keeps the cache:

    1. a fault (stream reset, silence, wrong output, a server's word) wakes the step that waits
    2. substitutes for just the lost blocks; all places take the new route (`Open`), and say what they hold
    3. the nearest journal before a substitute replays to it; places that lack a live step get it again
    4. the step goes on waiting: its output comes as if nothing had been

Where two servers cannot reach each other, the client passes that link's activations on itself.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from msgspec.structs import replace

from corolla.client.config import ClientConfig
from corolla.client.hop import Hop, ServerLink
from corolla.client.recovery import (
    Held,
    Place,
    lost_runs,
    mark_fresh,
    must_rebuild,
    plan_resends,
    replace_lost,
)
from corolla.client.router import Router, ServedModel
from corolla.clock import loop_time
from corolla.errors import (
    BadInput,
    CacheFull,
    HopFailed,
    JournalGap,
    LinkDown,
    MissingBlocks,
    NeedsReplay,
    NoRoute,
    OutOfOrder,
    Overloaded,
    Refused,
    RemoteProtocolError,
    SessionLost,
    SwarmError,
)
from corolla.ids import PeerId, new_session_id, short
from corolla.swarm.route import Route
from corolla.wire import messages as wire
from corolla.wire.journal import Journal
from corolla.wire.tensors import DType, WireTensor

log = logging.getLogger(__name__)
T = TypeVar("T")

WINDOW_STEPS = 4
WINDOW_BYTES = 8 << 20
"""Steps, or bytes of them, that may be on the ring unanswered; one step always may. The ring ends in a sink: the
client reads while it writes, so a slow tail slows the head and no queue grows."""
OVERLOAD_PAUSE_S = 0.2
RETRY_PAUSES_S = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0)
POLL_S = 1.0
PACED_BYTES = 4 << 20
PACE_S = 0.002
UNBOUNDED = 1 << 50
"""The client's own journal is bounded by the session's length: it holds what the user's prompt and text amount to."""


class SwarmAccess(Protocol):
    """What a session needs of the swarm it runs on (`client/swarm.py`)."""

    @property
    def own_peer(self) -> PeerId: ...

    async def find_route(
        self, model: ServedModel, *, blocks: range, tokens_needed: int, without: frozenset[PeerId]
    ) -> Route: ...

    async def link(self, peer: PeerId) -> ServerLink: ...

    def router(self, model: ServedModel) -> Router:
        """Told of what the session sees of servers."""
        ...


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One server of the route in use and the blocks `[start, end)` it runs."""

    peer_id: PeerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """New positions for all rows: `hidden` [rows, num_tokens, hidden_size] as it arrives at block 0."""

    hidden: WireTensor
    num_tokens: int
    position_ids: WireTensor | None = None
    token_ids: WireTensor | None = None


@dataclass(slots=True)
class _Pending:
    """A step under way: pushed to the segment that begins at block `at`, its answer outstanding."""

    step: wire.Step
    num_tokens: int
    want: wire.Want
    at: int = 0
    is_pushed: bool = False
    output: wire.Output | None = None


class _PlacesFailed(Exception):
    """Taking a route failed at these servers; others may do."""

    def __init__(self, errors: Mapping[PeerId, SwarmError]) -> None:
        self.errors = errors
        self.error = next(iter(errors.values()))
        super().__init__(str(self.error))


class Session:
    """Steps through all blocks of the model; `client/swarm.py` starts it."""

    def __init__(
        self,
        swarm: SwarmAccess,
        model: ServedModel,
        config: ClientConfig,
        *,
        max_tokens: int,
        max_rows: int,
        wire_dtype: DType,
    ) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.position = 0
        self.rows = 0
        """Sequences held; 0 before the first step."""
        self.timings: list[wire.HopTiming] = []
        """Of the last step, one for each hop in order."""
        self.recoveries = 0
        """How often the route was changed since the session began."""
        self._swarm = swarm
        self._config = config
        self._wire_dtype: DType = wire_dtype
        self._id = new_session_id()
        self._places: list[Place] = []
        self._hops: list[Hop] = []
        self._version = -1
        self._heads: dict[int, Journal] = {0: Journal(UNBOUNDED)}
        """First block of each segment → what the client pushed there."""
        self._step_no = 0
        self._pending: dict[int, _Pending] = {}
        self._trim_to: int | None = None
        self._rows: list[int] | None = None
        self._shunned: dict[PeerId, float] = {}
        self._faults: list[tuple[Hop, SwarmError]] = []
        self._suspect_links: set[tuple[PeerId, PeerId]] = set()
        self._draining: set[PeerId] = set()
        self._standby: dict[PeerId, Hop] = {}
        self._moving: asyncio.Task[None] | None = None
        self._drained_at = 0.0
        self._is_routing = False
        self._rewrites = 0
        """Counts trims and gathers: a history copied before one is not the history after it."""
        self._progress = asyncio.Event()
        self._refed: set[int] = set()
        """Heads whose cache is rebuilt from what the segment before them gives back."""
        self._replaying: dict[tuple[int, int], wire.Step] = {}
        """(step_no, position) of steps that are replayed through the client."""
        self._fruitless = 0
        """Recoveries since the last answer."""
        self._is_dirty = False
        self._is_closed = False
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    # --- what the owner sees

    @property
    def route(self) -> list[RouteHop]:
        return [RouteHop(place.peer, place.start, place.end) for place in self._places]

    @property
    def max_chunk_tokens(self) -> int:
        """Most positions × rows that every server of the route takes in one step."""
        return min(opened.max_chunk_tokens for opened in self._opened)

    @property
    def max_chunk_bytes(self) -> int:
        return min(opened.window_bytes for opened in self._opened)

    @property
    def prefill_in_chunks(self) -> bool:
        return all(opened.prefill_in_chunks for opened in self._opened)

    @property
    def needs_token_ids(self) -> bool:
        return any(opened.needs_token_ids for opened in self._opened)

    async def start(self) -> None:
        """Find the route and open every hop. Raises NoRoute, Refused or HopFailed; then nothing is held."""
        try:
            await self._recover(may_wait=False)
        except BaseException:
            self.close()
            raise

    def trim(self, num_tokens: int) -> None:
        """Forget all positions from `num_tokens` on. Costs nothing: it rides on the next step."""
        if not 0 <= num_tokens <= self.position:
            raise BadInput(f"cannot trim to {num_tokens} tokens: the session holds {self.position}")
        if self._trim_to is not None or num_tokens < self.position:
            self._trim_to = num_tokens
            self.position = num_tokens
            self._rewrites += 1

    def gather(self, rows: Sequence[int]) -> None:
        """Before the next step, row i of every cache becomes the present row `rows[i]`."""
        self._rows = list(rows) if self._rows is None else [self._rows[row] for row in rows]
        self._rewrites += 1

    async def step(
        self,
        hidden: WireTensor,
        *,
        num_tokens: int,
        want: wire.Want,
        position_ids: WireTensor | None = None,
        left_padding: list[int] | None = None,
        token_ids: WireTensor | None = None,
    ) -> WireTensor | None:
        """Run `hidden` [rows, num_tokens, hidden_size] through all blocks; the wanted positions come back."""
        entry = StepInput(hidden, num_tokens, position_ids, token_ids)
        return (await self.run([entry], want=want, left_padding=left_padding))[0]

    async def run(
        self, inputs: Sequence[StepInput], *, want: wire.Want, left_padding: list[int] | None = None
    ) -> list[WireTensor | None]:
        """Consecutive steps, several on the ring at a time. `want` "last": of the last step only.

        Survives lost servers. Raises MissingBlocks when nothing covers a block for long, Refused or BadInput for
        our own mistakes; `position` then is what it was, and the session can go on.
        """
        async with self._lock:
            self._check(inputs)
            steps = self._make_steps(inputs, want, left_padding)
            try:
                await self._prepare()
                self._pending = {pending.step.step_no: pending for pending in steps}
                await self._drive()
            except BaseException:
                self._is_dirty = True  # servers may have gone further than we count
                raise
            finally:
                self._pending = {}
            self._commit(steps)
            return [None if p.output is None else p.output.hidden for p in steps]

    def close(self) -> None:
        """Give the session's place on every server back. May be called twice."""
        self._is_closed = True
        if self._moving is not None:
            self._moving.cancel()
        for hop in (*self._hops, *self._standby.values()):
            hop.close()

    # --- a run

    def _check(self, inputs: Sequence[StepInput]) -> None:
        if self._is_closed:
            raise BadInput("the session is closed; open another")
        new_tokens = sum(entry.num_tokens for entry in inputs)
        if self.position + new_tokens > self.max_tokens:
            raise BadInput(
                f"the session was opened for {self.max_tokens} tokens; {self.position} are held, "
                f"{new_tokens} more do not fit"
            )
        if any(entry.hidden.shape[0] > self.max_rows for entry in inputs):
            raise BadInput(f"the session was opened for {self.max_rows} rows, not {inputs[0].hidden.shape[0]}")

    def _make_steps(
        self, inputs: Sequence[StepInput], want: wire.Want, left_padding: list[int] | None
    ) -> list[_Pending]:
        steps: list[_Pending] = []
        position = self.position
        for number, entry in enumerate(inputs):
            is_last = number == len(inputs) - 1
            step_want: wire.Want = want if is_last or want == "all" else "none"
            step = wire.Step(
                step_no=self._step_no + number,
                position=position,
                trim_to=self._trim_to if number == 0 else None,
                rows=self._rows if number == 0 else None,
                left_padding=left_padding,
                want=step_want,
                hidden=entry.hidden,
                position_ids=entry.position_ids,
                token_ids=entry.token_ids,
            )
            steps.append(_Pending(step, entry.num_tokens, step_want))
            position += entry.num_tokens
        return steps

    def _commit(self, steps: Sequence[_Pending]) -> None:
        last = steps[-1]
        self._step_no += len(steps)
        self.position = last.step.position + last.num_tokens
        self.rows = last.step.hidden.shape[0]
        self._trim_to = self._rows = None
        if last.output is not None:
            self.timings = last.output.timings
            self._tell_router(last)

    async def _prepare(self) -> None:
        """Mend what broke since the last run, before anything new is sent."""
        if self._is_dirty:
            for journal in self._heads.values():
                journal.forget(self._step_no)
            self._places = mark_fresh(self._places, range(len(self._places)))
            await self._recover(may_wait=True, must=True)
            self._is_dirty = False
        elif self._faults or any(hop.error for hop in self._hops):
            await self._recover(may_wait=True)

    async def _drive(self) -> None:
        """Push what the window allows, take what comes, mend what breaks, until every step is answered."""
        while any(pending.output is None for pending in self._pending.values()):
            self._news.clear()
            if self._faults:
                await self._mend()
                continue
            self._push_window()
            try:
                async with asyncio.timeout(self._config.step_timeout_s):
                    await self._news.wait()
            except TimeoutError:
                raise HopFailed(
                    self._hops[-1].peer, f"no output came round within {self._config.step_timeout_s:g} s"
                ) from None

    def _push_window(self) -> None:
        waiting = [p for p in self._pending.values() if p.is_pushed and p.output is None]
        room = WINDOW_STEPS - len(waiting)
        used = sum(p.step.hidden.nbytes for p in waiting)
        for pending in self._pending.values():
            if pending.is_pushed:
                continue
            if room <= 0 or (used and used + pending.step.hidden.nbytes > WINDOW_BYTES):
                return
            self._push(pending, 0, pending.step.hidden)
            pending.is_pushed = True
            room, used = room - 1, used + pending.step.hidden.nbytes

    def _push(self, pending: _Pending, at: int, hidden: WireTensor) -> None:
        """To the head of the segment that begins at block `at`."""
        pending.at = at
        step = replace(pending.step, hidden=hidden, want=self._want_at(pending, at), route_version=self._version)
        journal = self._heads[at]
        if step.step_no > journal.last_step_no:
            journal.add(step)
        self._hop_at(at).push(step)

    def _want_at(self, pending: _Pending, at: int) -> wire.Want:
        """A segment that is not the last must give every position: they all go on."""
        return pending.want if at == max(self._heads) else "all"

    # --- what hops report

    def on_output(self, hop: Hop, output: wire.Output) -> None:
        if output.replay:
            self._pass_replay_on(hop, output)
            return
        pending = self._pending.get(output.step_no)
        if pending is None or pending.output is not None or hop not in self._hops:
            return  # a late or second answer: nobody waits for it
        if self._segment_of(hop) != pending.at:
            return
        problem = _flaw_of(output, pending, self._want_at(pending, pending.at))
        if problem is not None:
            self._drop(hop, HopFailed(hop.peer, problem))
            return
        following = [head for head in self._heads if head > pending.at]
        if following:
            assert output.hidden is not None
            self._push(pending, min(following), output.hidden)
        else:
            pending.output = output
            self._fruitless = 0
            self._news.set()

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        if hop in self._hops and not self._is_closed:
            log.info("fault", extra={"peer": short(hop.peer), "reason": str(error)[:200]})
            router = self._swarm.router(self.model)
            if isinstance(error, LinkDown):
                router.saw_link_fault(hop.peer, error.peer)
            elif isinstance(error, HopFailed | RemoteProtocolError):
                router.saw_fault(hop.peer)
            self._faults.append((hop, error))
            self._news.set()

    def on_drain(self, hop: Hop, deadline_s: float) -> None:
        self._draining.add(hop.peer)
        self._drained_at = max(self._drained_at, loop_time() + deadline_s)
        self._begin_moving()

    def on_progress(self, hop: Hop) -> None:
        self._progress.set()

    def _drop(self, hop: Hop, error: SwarmError) -> None:
        """That server is at fault by our own evidence: leave it."""
        hop.link.drop(hop)
        hop.fail(error)

    # --- leaving a server that leaves

    def _begin_moving(self) -> None:
        is_idle = (self._moving is None or self._moving.done()) and not self._is_routing
        if is_idle and not self._is_closed and any(place.peer in self._draining for place in self._places):
            self._moving = asyncio.get_running_loop().create_task(self._move_away(self._drained_at))

    async def _stop_moving(self) -> None:
        """A recovery takes the route over: two hands on it would open the same session twice."""
        moving = self._moving
        if moving is not None and moving is not asyncio.current_task() and not moving.done():
            moving.cancel()
            await asyncio.wait([moving])

    async def _move_away(self, deadline: float) -> None:
        """Make before break: build a substitute while the old server serves on, then swap between two steps."""
        while not self._is_closed and loop_time() < deadline:
            index = next((i for i, place in enumerate(self._places) if place.peer in self._draining), None)
            if index is None:
                return
            try:
                async with asyncio.timeout(deadline - loop_time()):
                    await self._swap(index)
            except TimeoutError:
                return  # the old server ends now, and is lost like any other
            except (NoRoute, HopFailed, Refused, _PlacesFailed) as failed:
                log.info("no substitute yet", extra={"reason": str(failed)[:200]})
                await asyncio.sleep(POLL_S)

    async def _swap(self, index: int) -> None:
        place, version, rewrites = self._places[index], self._version, self._rewrites
        in_use = frozenset(other.peer for other in self._places)
        route = await self._find(range(place.start, place.end), without=in_use)
        if len(route.hops) > 1:
            blocks = list(range(place.start, place.end))
            raise MissingBlocks(blocks, "one server alone must stand by for another")
        peer = next(iter(route.hops)).peer
        link = await self._swarm.link(peer)
        if (version, rewrites) != (self._version, self._rewrites):
            return  # the route or the history is another now: begin again
        hop = self._standby[peer] = Hop(link, self._id, place.start, place.end, self)
        try:
            await self._build_aside(hop, index)
            async with self._lock:
                if (version, rewrites) != (self._version, self._rewrites) or hop.error is not None:
                    return
                places = list(self._places)
                places[index] = Place(peer, place.start, place.end, catches_up=True)
                await self._take_route(places)
                log.info("moved", extra={"from": short(place.peer), "to": short(peer)})
        finally:
            if self._standby.get(peer) is hop:
                del self._standby[peer]
                if hop not in self._hops:
                    hop.close()

    async def _build_aside(self, hop: Hop, index: int) -> None:
        """Give a server that stands by the history up to now, beside the route."""
        ask = self._ask([*self._places[:index], Place(hop.peer, hop.start, hop.end), *self._places[index + 1 :]], index)
        await hop.open(replace(ask, is_fresh=True, standby=True, hold=True))
        target = self.position
        if hop.start in self._heads and self._heads[hop.start].first_position > 0:
            raise MissingBlocks(list(range(hop.start, hop.end)), "its history has to come round from the start")
        if hop.start in self._heads:
            await hop.connect()
            await self._replay_to(hop, self._heads[hop.start], live_from=1 << 60)
        else:
            self._hops[index - 1].replay(
                wire.Replay(
                    session=self._id, route_version=self._version, from_position=0, live_from=1 << 60, to=hop.peer
                )
            )
        while hop.opened is not None and hop.opened.cached_tokens < target:
            self._progress.clear()
            await self._progress.wait()
            if hop.error is not None:
                raise hop.error

    # --- recovery

    async def _mend(self) -> None:
        """Judge the faults that came, then go on with the same steps."""
        faults, self._faults = self._faults, []
        must = False
        for hop, error in faults:
            if hop not in self._hops:
                continue  # of a place that has been replaced since
            match error:
                case Overloaded():  # a full line is no failure: the step comes again
                    await asyncio.sleep(OVERLOAD_PAUSE_S)
                    must = True
                case LinkDown():
                    must |= self._link_failed(hop, error.peer)
                case NeedsReplay() | JournalGap() | OutOfOrder():  # it cannot get there from what it holds
                    self._places = mark_fresh(self._places, [self._hops.index(hop)])
                    must = True
                case SessionLost() | HopFailed() | RemoteProtocolError():
                    must = True  # it is lost: `hop.error`, or found when it is asked again
                case _:
                    raise error  # our own mistake: nobody is banned, nothing is retried
        if must:
            self._fruitless += 1
            await asyncio.sleep(RETRY_PAUSES_S[min(self._fruitless - 1, len(RETRY_PAUSES_S) - 1)])
        await self._recover(may_wait=True, must=must)

    def _link_failed(self, hop: Hop, peer: PeerId) -> bool:
        """Two servers cannot talk. The first time they may try again; then the client stands between them.

        False: old news, the route has changed since or the other one is lost.
        """
        index = self._hops.index(hop)
        if index + 1 >= len(self._hops) or self._hops[index + 1].peer != peer:
            return False
        if self._hops[index + 1].error is not None:
            return True
        pair = (hop.peer, peer)
        if pair in self._suspect_links:
            start = self._places[index + 1].start
            if start not in self._heads:
                log.warning("link goes through the client", extra={"peer": short(hop.peer), "next": short(peer)})
                journal = self._heads[start] = Journal(UNBOUNDED)
                journal.skip(self.position)
                self._heads = dict(sorted(self._heads.items()))
        self._suspect_links.add(pair)
        return True

    async def _recover(self, *, may_wait: bool, must: bool = False) -> None:
        """Take a route on which every place holds, or is being given, all that was answered."""
        deadline = loop_time() + (self._config.wait_for_servers_s if may_wait else 0.0)
        problem: SwarmError | None = None
        tried: set[PeerId] = set()
        while True:
            lost = {index for index, hop in enumerate(self._hops) if hop.error is not None}
            if self._places and not lost and not must and not self._faults:
                return
            await self._stop_moving()
            self._faults.clear()
            try:
                self._is_routing = True
                await self._take_route(await self._replace(lost, deadline))
            except _PlacesFailed as failed:
                problem, must = failed.error, True
                self._leave_out(failed.errors)
                if tried.issuperset(failed.errors):  # nobody new: give the swarm time
                    if loop_time() >= deadline:
                        raise problem from failed
                    await asyncio.sleep(POLL_S)
                tried.update(failed.errors)
            except NoRoute:
                if problem is None or may_wait:
                    raise
                raise problem from None  # there was a chain, and it said no: that is what the user must hear
            else:
                return
            finally:
                self._is_routing = False
                self._begin_moving()

    async def _replace(self, lost: set[int], deadline: float) -> list[Place]:
        """The places with substitutes for the lost ones; while nothing covers a block, wait for a server to appear."""
        for index in lost:
            self._shun(self._hops[index].peer)
        is_told = False
        while True:
            try:
                return await self._substitute(lost)
            except MissingBlocks as missing:
                if loop_time() >= deadline:
                    raise
                if not is_told:
                    log.warning("no server for blocks %s: waiting for one", missing.blocks)
                    is_told = True
                await asyncio.sleep(POLL_S)

    async def _substitute(self, lost: set[int]) -> list[Place]:
        """Others for just the lost blocks; where that cannot be, a whole new route that keeps whom it can."""
        if self._places:
            try:
                return await self._substitute_apart(lost)
            except MissingBlocks:
                log.info("no server for the lost blocks alone")
        route = await self._find(range(self.model.num_blocks), without=frozenset())
        kept = {(place.peer, place.start, place.end): place for place in self._places}
        return [
            kept.get((hop.peer, hop.start, hop.end)) or Place(hop.peer, hop.start, hop.end, is_fresh=True)
            for hop in route.hops
        ]

    async def _substitute_apart(self, lost: set[int]) -> list[Place]:
        taken = {hop.peer for index, hop in enumerate(self._hops) if index not in lost}
        substitutes: dict[int, Route] = {}
        for blocks in lost_runs(self._places, lost):
            route = substitutes[blocks.start] = await self._find(blocks, without=frozenset(taken))
            taken |= {hop.peer for hop in route.hops}  # one place for each server: it knows a session by its id
        return replace_lost(self._places, lost, substitutes)

    async def _find(self, blocks: range, *, without: frozenset[PeerId]) -> Route:
        now = loop_time()
        shunned = frozenset(peer for peer, until in self._shunned.items() if until > now)
        return await self._swarm.find_route(
            self.model,
            blocks=blocks,
            tokens_needed=self.max_tokens * self.max_rows,
            without=without | shunned | self._draining,
        )

    def _tell_router(self, last: _Pending) -> None:
        router = self._swarm.router(self.model)
        for place, timing in zip(self._places, self.timings, strict=False):
            router.saw_step(place.peer, timing, num_blocks=place.end - place.start, num_tokens=last.num_tokens)

    def _leave_out(self, errors: Mapping[PeerId, SwarmError]) -> None:
        router = self._swarm.router(self.model)
        for peer, error in errors.items():
            self._shun(peer)
            if isinstance(error, HopFailed | RemoteProtocolError):  # our own evidence; a refusal is no fault
                router.saw_fault(peer)
            log.info("server left out", extra={"peer": short(peer), "reason": str(error)[:200]})

    def _shun(self, peer: PeerId) -> None:
        self._shunned[peer] = loop_time() + self._config.shun_s

    async def _take_route(self, places: list[Place]) -> None:
        """Put every place on the route, as often as it takes for all to have what they need."""
        last_answered = self._last_answered
        self._follow_borders(places)
        while True:
            held = await self._open_all(places)
            whole = {start: journal.first_position == 0 for start, journal in self._heads.items()}
            rebuilt = must_rebuild(places, held, whole, last_answered)
            fresh = {index for index, place in enumerate(places) if place.is_fresh}
            if rebuilt == fresh:
                break
            places = mark_fresh(places, rebuilt)
        await self._connect()
        if self._version > 0:
            self.recoveries += 1
            await self._resend(places, held)
        self._places = [Place(place.peer, place.start, place.end) for place in places]
        self._suspect_links &= {(a.peer, b.peer) for a, b in pairwise(places)}

    def _follow_borders(self, places: Sequence[Place]) -> None:
        """Where a new place lies across a border that the client kept, that border is gone."""
        starts = {place.start for place in places}
        for head in [head for head in self._heads if head not in starts]:
            del self._heads[head]
        for pending in self._pending.values():
            pending.at = max(head for head in self._heads if head <= pending.at)

    async def _open_all(self, places: Sequence[Place]) -> list[Held]:
        """All hops at once, under a new route version. Raises _PlacesFailed, naming all that will not."""
        self._version += 1
        hops = _all_or_failed(
            [place.peer for place in places],
            await asyncio.gather(*(self._hop_for(place) for place in places), return_exceptions=True),
        )
        for old in self._hops:
            if old not in hops:
                old.close()
        self._hops = hops
        self._places = list(places)
        asks = [self._ask(places, index) for index in range(len(places))]
        answers = await asyncio.gather(
            *(hop.open(ask) for hop, ask in zip(hops, asks, strict=True)), return_exceptions=True
        )
        for hop, answer in zip(hops, answers, strict=True):
            if isinstance(answer, _MAY_DO_ELSEWHERE):
                self._drop(hop, answer)
        return [
            Held(opened.cached_tokens, opened.last_step_no, opened.journal_from)
            for opened in _all_or_failed([hop.peer for hop in hops], answers)
        ]

    async def _hop_for(self, place: Place) -> Hop:
        """The hop that holds this place already, or a new one. A server that takes other blocks begins afresh."""
        if place.catches_up and place.peer in self._standby:
            return self._standby[place.peer]
        for hop in self._hops:
            if hop.peer == place.peer and hop.error is None:
                hop.start, hop.end = place.start, place.end
                return hop
        link = await self._swarm.link(place.peer)
        return Hop(link, self._id, place.start, place.end, self)

    def _ask(self, places: Sequence[Place], index: int) -> wire.Open:
        place = places[index]
        following = places[index + 1] if index + 1 < len(places) else None
        if following is not None and following.start in self._heads:
            following = None
        feeds_fresh = following is not None and (following.is_fresh or following.catches_up)
        return wire.Open(
            session=self._id,
            route_version=self._version,
            fingerprint=self.model.fingerprint,
            start=place.start,
            end=place.end,
            max_tokens=self.max_tokens,
            max_rows=self.max_rows,
            upstream=self._swarm.own_peer if place.start in self._heads else places[index - 1].peer,
            next=None if following is None else following.peer,
            want="last",
            is_fresh=place.is_fresh,
            hold=feeds_fresh and not place.is_fresh and self._version > 0,
            replay_on=feeds_fresh and place.is_fresh,
            wire_dtype=self._wire_dtype,
        )

    async def _connect(self) -> None:
        """Our own streams: to the head of every segment, and from its tail."""
        ends = {index for index, hop in enumerate(self._hops) if hop.start in self._heads}
        ends |= {index - 1 for index in ends if index > 0} | {len(self._hops) - 1}
        hops = [self._hops[index] for index in sorted(ends)]
        outcomes = await asyncio.gather(*(hop.connect() for hop in hops), return_exceptions=True)
        for hop, outcome in zip(hops, outcomes, strict=True):
            if isinstance(outcome, _MAY_DO_ELSEWHERE):
                self._drop(hop, outcome)
        _all_or_failed([hop.peer for hop in hops], outcomes)

    async def _resend(self, places: Sequence[Place], held: Sequence[Held]) -> None:
        """Give every place what it lacks: history to the fresh ones, live steps to those that missed them."""
        live_from = self._last_answered + 1
        self._begin_refeeding(places)
        for order in plan_resends(places, held, self._heads):
            self._order_replay(order.index, order.from_position, order.from_step, live_from)
        for head, journal in self._heads.items():
            index = next(index for index, place in enumerate(places) if place.start == head)
            tail = self._tail_of(head)
            if head in self._refed:
                continue
            if places[index].is_fresh or places[index].catches_up:
                await self._replay_to(self._hops[index], journal, live_from, held[index].position)
            else:
                for step in journal.recent(held[index].last_step_no + 1):
                    self._hops[index].push(replace(step, route_version=self._version))
            here = [no for no, p in self._pending.items() if p.is_pushed and p.output is None and p.at == head]
            if here and not places[tail].is_fresh and held[tail].last_step_no >= min(here):
                self._order_replay(tail, None, min(here), live_from)

    def _order_replay(self, index: int, from_position: int | None, from_step: int, live_from: int) -> None:
        self._hops[index].replay(
            wire.Replay(
                session=self._id,
                route_version=self._version,
                from_position=from_position,
                from_step=from_step,
                live_from=live_from,
            )
        )

    async def _replay_to(self, hop: Hop, journal: Journal, live_from: int, from_position: int = 0) -> None:
        """Build a head's cache, from this position on, from our own journal."""
        opened = hop.opened
        assert opened is not None
        journal.compact()
        steps = [*journal.replay(from_position, opened.max_chunk_tokens, opened.window_bytes)]
        steps += [
            replace(step, replay=step.step_no < live_from)
            for step in journal.recent(0)
            if step.position + step.hidden.shape[1] > from_position
        ]
        if self._refed and hop.start == 0:
            steps = [replace(step, want="all") if step.replay else step for step in steps]
            self._replaying = {(step.step_no, step.position): step for step in steps if step.replay}
        for step in steps:
            while hop.pending_bytes > PACED_BYTES and hop.error is None:  # noqa: ASYNC110 - nobody tells us of room
                await asyncio.sleep(PACE_S)
            hop.push(replace(step, route_version=self._version))

    def _begin_refeeding(self, places: Sequence[Place]) -> None:
        """Where the client stands between two servers and has not kept all it passed on, a rebuilt server is fed by
        replaying everything from the start; what comes back from each segment goes on to the next."""
        gaps = [
            place.start
            for place in places
            if place.is_fresh and place.start in self._heads and self._heads[place.start].first_position > 0
        ]
        self._refed = {head for head in self._heads if 0 < head <= max(gaps, default=0)}
        self._replaying = {}
        for head in self._refed:
            self._heads[head] = Journal(UNBOUNDED)
        if self._refed:
            for pending in self._pending.values():
                pending.at = 0

    def _pass_replay_on(self, hop: Hop, output: wire.Output) -> None:
        """From the tail of one segment to the head of the next."""
        if hop not in self._hops or output.hidden is None:
            return
        tokens = output.hidden.shape[1]
        step = self._replaying.get((output.step_no, output.position - tokens))
        segment = self._segment_of(hop)
        following = [head for head in self._heads if segment is not None and head > segment]
        if step is None or not following or min(following) not in self._refed:
            return
        head = min(following)
        goes_on = any(later in self._refed for later in following if later > head)
        step = replace(
            step, hidden=output.hidden, want="all" if goes_on else "none", route_version=self._version, timings=[]
        )
        journal = self._heads[head]
        if step.step_no > journal.last_step_no and (step.trim_to is not None or step.rows is not None):
            journal.add(step)
        else:
            journal.add_history(step)
        self._hop_at(head).push(step)

    # --- small questions

    @property
    def _opened(self) -> list[wire.Opened]:
        return [hop.opened for hop in self._hops if hop.opened is not None]

    @property
    def _last_answered(self) -> int:
        """Every step up to this one has given its output."""
        unanswered = [no for no, pending in self._pending.items() if pending.output is None]
        return min(unanswered, default=self._step_no + len(self._pending)) - 1

    def _hop_at(self, block: int) -> Hop:
        return next(hop for hop in self._hops if hop.start == block)

    def _segment_of(self, tail: Hop) -> int | None:
        """First block of the segment that ends with this hop."""
        index = self._hops.index(tail)
        if index + 1 < len(self._hops) and self._hops[index + 1].start not in self._heads:
            return None
        return max(head for head in self._heads if head <= tail.start)

    def _tail_of(self, head: int) -> int:
        following = [start for start in self._heads if start > head]
        end = min(following, default=self.model.num_blocks)
        return next(index for index, hop in enumerate(self._hops) if hop.end == end)


_MAY_DO_ELSEWHERE = (HopFailed, CacheFull, Overloaded, SessionLost, RemoteProtocolError)
"""What one server's failure to take a place looks like; everything else is our own mistake."""


def _all_or_failed(peers: Sequence[PeerId], outcomes: Sequence[T | BaseException]) -> list[T]:
    """The results. Raises what is our own mistake, else _PlacesFailed with every server's error."""
    results: list[T] = []
    errors: dict[PeerId, SwarmError] = {}
    for peer, outcome in zip(peers, outcomes, strict=True):
        if isinstance(outcome, _MAY_DO_ELSEWHERE):
            errors[peer] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results.append(outcome)
    if errors:
        raise _PlacesFailed(errors)
    return results


def _flaw_of(output: wire.Output, pending: _Pending, want: wire.Want) -> str | None:
    """What is wrong with an output, by our own evidence; None: nothing."""
    step, hidden = pending.step, output.hidden
    if output.position != step.position + pending.num_tokens:
        return (
            f"it holds {output.position} positions after step {step.step_no}, not {step.position + pending.num_tokens}"
        )
    if want == "none":
        return None
    if hidden is None:
        return f"its output of step {step.step_no} has no hidden states"
    shape = list(step.hidden.shape)
    if want == "last":
        shape[1] = 1
    if list(hidden.shape) != shape or hidden.dtype != step.hidden.dtype:
        return f"its output is {hidden.dtype} {list(hidden.shape)}, not {step.hidden.dtype} {shape}"
    return None
