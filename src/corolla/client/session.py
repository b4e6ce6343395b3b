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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from corolla.client.config import ClientConfig
from corolla.client.hop import Hop
from corolla.client.recovery import (
    Place,
    mark_fresh,
)
from corolla.client.ring import Pending, PlacesFailed, Ring, SwarmAccess
from corolla.client.router import ServedModel
from corolla.client.substitutes import POLL_S, Substitutes
from corolla.clock import loop_time
from corolla.errors import (
    BadInput,
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
from corolla.ids import PeerId, short
from corolla.wire import messages as wire
from corolla.wire.tensors import DType, WireTensor

log = logging.getLogger(__name__)

WINDOW_STEPS = 4
WINDOW_BYTES = 8 << 20
"""Steps, or bytes of them, that may be on the ring unanswered; one step always may. The ring ends in a sink: the
client reads while it writes, so a slow tail slows the head and no queue grows."""
OVERLOAD_PAUSE_S = 0.2
RETRY_PAUSES_S = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0)


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
        self.chunk_timings: list[list[wire.HopTiming]] = []
        """The same for every step of the last run, which has several when a prompt goes in chunks."""
        self.recoveries = 0
        """How often the route was changed since the session began."""
        self._swarm = swarm
        self._config = config
        self._ring = Ring(swarm, model, self, max_tokens=max_tokens, max_rows=max_rows, wire_dtype=wire_dtype)
        self._substitutes = Substitutes(swarm, model, config, tokens_needed=max_tokens * max_rows)
        self._step_no = 0
        self._pending: dict[int, Pending] = {}
        self._trim_to: int | None = None
        self._rows: list[int] | None = None
        self._faults: list[tuple[Hop, SwarmError]] = []
        self._suspect_links: set[tuple[PeerId, PeerId]] = set()
        self._moving: asyncio.Task[None] | None = None
        self._drained_at = 0.0
        self._is_routing = False
        self._rewrites = 0
        """Counts trims and gathers: a history copied before one is not the history after it."""
        self._fruitless = 0
        """Recoveries since the last answer."""
        self._is_dirty = False
        self._is_closed = False
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    # --- what the owner sees

    @property
    def route(self) -> list[RouteHop]:
        return [RouteHop(place.peer, place.start, place.end) for place in self._ring.places]

    @property
    def max_chunk_tokens(self) -> int:
        """Most positions × rows that every server of the route takes in one step."""
        return min(opened.max_chunk_tokens for opened in self._ring.opened)

    @property
    def max_chunk_bytes(self) -> int:
        return min(opened.window_bytes for opened in self._ring.opened)

    @property
    def prefill_in_chunks(self) -> bool:
        return all(opened.prefill_in_chunks for opened in self._ring.opened)

    @property
    def needs_token_ids(self) -> bool:
        return any(opened.needs_token_ids for opened in self._ring.opened)

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
        self._ring.close()

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
    ) -> list[Pending]:
        steps: list[Pending] = []
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
            steps.append(Pending(step, entry.num_tokens, step_want))
            position += entry.num_tokens
        return steps

    def _commit(self, steps: Sequence[Pending]) -> None:
        last = steps[-1]
        self._step_no += len(steps)
        self.position = last.step.position + last.num_tokens
        self.rows = last.step.hidden.shape[0]
        self._trim_to = self._rows = None
        if last.output is not None:
            self.timings = last.output.timings
            self.chunk_timings = [p.output.timings for p in steps if p.output is not None]
            self._tell_router(last)

    async def _prepare(self) -> None:
        """Mend what broke since the last run, before anything new is sent."""
        if self._is_dirty:
            for journal in self._ring.heads.values():
                journal.forget(self._step_no)
            self._ring.places = mark_fresh(self._ring.places, range(len(self._ring.places)))
            await self._recover(may_wait=True, must=True)
            self._is_dirty = False
        elif self._faults or any(hop.error for hop in self._ring.hops):
            await self._recover(may_wait=True)

    async def _drive(self) -> None:
        """Push what the window allows, take what comes, mend what breaks, until every step is answered."""
        while any(pending.output is None for pending in self._pending.values()):
            self._news.clear()
            if self._faults:
                await self._mend()
                continue
            self._push_window()
            if not await self._has_news():
                await self._suspect_links_between()

    async def _has_news(self) -> bool:
        """Wait for an output or a fault. False: for some time nothing has come, though no server has work to do."""
        quiet_s, deadline = self._config.liveness.dead_after_s, loop_time() + self._config.step_timeout_s
        while loop_time() < deadline:
            try:
                async with asyncio.timeout(min(quiet_s, deadline - loop_time())):
                    await self._news.wait()
                    return True
            except TimeoutError:
                is_idle = all(hop.link.life.peer_queue_s == 0 for hop in self._ring.hops)
                if is_idle and self._ring.has_links:
                    return False
        raise HopFailed(self._ring.hops[-1].peer, f"no output came round within {self._config.step_timeout_s:g} s")

    async def _suspect_links_between(self) -> None:
        """All servers answer us and are idle: a link between two of them swallows what they push. Stand in between."""
        log.warning("steps vanish between servers; they go through the client from now on")
        for place in self._ring.places[1:]:
            self._ring.part_at(place.start, self.position)
        await self._recover(may_wait=True, must=True)

    def _push_window(self) -> None:
        waiting = [p for p in self._pending.values() if p.is_pushed and p.output is None]
        room = WINDOW_STEPS - len(waiting)
        used = sum(p.step.hidden.nbytes for p in waiting)
        for pending in self._pending.values():
            if pending.is_pushed:
                continue
            if room <= 0 or (used and used + pending.step.hidden.nbytes > WINDOW_BYTES):
                return
            self._ring.push(pending, 0, pending.step.hidden)
            pending.is_pushed = True
            room, used = room - 1, used + pending.step.hidden.nbytes

    # --- what hops report

    def on_output(self, hop: Hop, output: wire.Output) -> None:
        if output.route_version != self._ring.version:
            return  # of a route that is no longer in use: it may have been a part of the way then, and not the end
        if output.replay:
            self._ring.pass_replay_on(hop, output)
            return
        pending = self._pending.get(output.step_no)
        if pending is None or pending.output is not None or hop not in self._ring.hops:
            return  # a late or second answer: nobody waits for it
        if self._ring.segment_of(hop) != pending.at:
            return
        problem = _flaw_of(output, pending, self._ring.want_at(pending, pending.at))
        if problem is not None:
            self._ring.drop(hop, HopFailed(hop.peer, problem))
            return
        following = self._ring.head_after(pending.at)
        if following is not None:
            assert output.hidden is not None
            self._ring.push(pending, following, output.hidden)
        else:
            pending.output = output
            self._fruitless = 0
            self._news.set()

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        if hop in self._ring.hops and not self._is_closed:
            log.info("fault", extra={"peer": short(hop.peer), "reason": str(error)[:200]})
            router = self._swarm.router(self.model)
            if isinstance(error, LinkDown):
                router.saw_link_fault(hop.peer, error.peer)
            elif isinstance(error, HopFailed | RemoteProtocolError):
                router.saw_fault(hop.peer)
            self._faults.append((hop, error))
            self._news.set()

    def on_drain(self, hop: Hop, deadline_s: float) -> None:
        self._substitutes.draining.add(hop.peer)
        self._drained_at = max(self._drained_at, loop_time() + deadline_s)
        self._begin_moving()

    def on_progress(self, hop: Hop) -> None:
        self._ring.progress.set()

    # --- leaving a server that leaves

    def _begin_moving(self) -> None:
        is_idle = (self._moving is None or self._moving.done()) and not self._is_routing
        if (
            is_idle
            and not self._is_closed
            and any(place.peer in self._substitutes.draining for place in self._ring.places)
        ):
            self._moving = asyncio.get_running_loop().create_task(self._move_away(self._drained_at))

    def _leaving_place(self) -> int | None:
        draining = self._substitutes.draining
        return next((index for index, place in enumerate(self._ring.places) if place.peer in draining), None)

    async def _stop_moving(self) -> None:
        """A recovery takes the route over: two hands on it would open the same session twice."""
        moving = self._moving
        if moving is not None and moving is not asyncio.current_task() and not moving.done():
            moving.cancel()
            await asyncio.wait([moving])

    async def _move_away(self, deadline: float) -> None:
        """Make before break: build a substitute while the old server serves on, then swap between two steps."""
        while not self._is_closed and loop_time() < deadline:
            index = next(
                (i for i, place in enumerate(self._ring.places) if place.peer in self._substitutes.draining), None
            )
            if index is None:
                return
            try:
                async with asyncio.timeout(deadline - loop_time()):
                    await self._swap(index)
            except TimeoutError:
                return  # the old server ends now, and is lost like any other
            except (NoRoute, HopFailed, Refused, PlacesFailed) as failed:
                log.info("no substitute yet", extra={"reason": str(failed)[:200]})
                await asyncio.sleep(POLL_S)

    async def _swap(self, index: int) -> None:
        place, version, rewrites = self._ring.places[index], self._ring.version, self._rewrites
        in_use = frozenset(other.peer for other in self._ring.places)
        route = await self._substitutes.find(range(place.start, place.end), without=in_use)
        if len(route.hops) > 1:
            blocks = list(range(place.start, place.end))
            raise MissingBlocks(blocks, "one server alone must stand by for another")
        peer = next(iter(route.hops)).peer
        link = await self._swarm.link(peer)
        if (version, rewrites) != (self._ring.version, self._rewrites):
            return  # the route or the history is another now: begin again
        hop = self._ring.standby[peer] = self._ring.new_hop(link, place.start, place.end)
        try:
            await self._ring.build_aside(hop, index, self.position)
            async with self._lock:
                if (version, rewrites) != (self._ring.version, self._rewrites) or hop.error is not None:
                    return
                places = list(self._ring.places)
                places[index] = Place(peer, place.start, place.end, catches_up=True)
                await self._take(places)
                log.info("moved", extra={"from": short(place.peer), "to": short(peer)})
        finally:
            if self._ring.standby.get(peer) is hop:
                del self._ring.standby[peer]
                if hop not in self._ring.hops:
                    hop.close()

    # --- recovery

    async def _mend(self) -> None:
        """Judge the faults that came, then go on with the same steps."""
        faults, self._faults = self._faults, []
        must = False
        for hop, error in faults:
            if hop not in self._ring.hops:
                continue  # of a place that has been replaced since
            match error:
                case Overloaded():  # a full line is no failure: the step comes again
                    await asyncio.sleep(OVERLOAD_PAUSE_S)
                    must = True
                case LinkDown():
                    must |= self._link_failed(hop, error.peer)
                case NeedsReplay() | JournalGap() | OutOfOrder():  # it cannot get there from what it holds
                    self._ring.places = mark_fresh(self._ring.places, [self._ring.hops.index(hop)])
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
        index = self._ring.hops.index(hop)
        if index + 1 >= len(self._ring.hops) or self._ring.hops[index + 1].peer != peer:
            return False
        if self._ring.hops[index + 1].error is not None:
            return True
        pair = (hop.peer, peer)
        if pair in self._suspect_links:
            log.warning("link goes through the client", extra={"peer": short(hop.peer), "next": short(peer)})
            self._ring.part_at(self._ring.places[index + 1].start, self.position)
        self._suspect_links.add(pair)
        return True

    async def _recover(self, *, may_wait: bool, must: bool = False) -> None:
        """Take a route on which every place holds, or is being given, all that was answered."""
        deadline = loop_time() + (self._config.wait_for_servers_s if may_wait else 0.0)
        problem: SwarmError | None = None
        tried: set[PeerId] = set()
        while True:
            lost = {index for index, hop in enumerate(self._ring.hops) if hop.error is not None}
            if self._ring.places and not lost and not must and not self._faults:
                return
            await self._stop_moving()
            self._faults.clear()
            try:
                self._is_routing = True
                await self._take(await self._substitutes.wait_for(self._ring.places, lost, deadline))
            except PlacesFailed as failed:
                problem, must = failed.error, True
                self._substitutes.leave_out(failed.errors)
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

    async def _take(self, places: list[Place]) -> None:
        await self._ring.take(places, self._pending, last_answered=self._last_answered)
        self.recoveries += self._ring.version > 0
        self._suspect_links &= {(a.peer, b.peer) for a, b in pairwise(places)}

    def _tell_router(self, last: Pending) -> None:
        router = self._swarm.router(self.model)
        for place, timing in zip(self._ring.places, self.timings, strict=False):
            router.saw_step(place.peer, timing, num_blocks=place.end - place.start, num_tokens=last.num_tokens)

    # --- small questions

    @property
    def _last_answered(self) -> int:
        """Every step up to this one has given its output."""
        unanswered = [no for no, pending in self._pending.items() if pending.output is None]
        return min(unanswered, default=self._step_no + len(self._pending)) - 1


def _flaw_of(output: wire.Output, pending: Pending, want: wire.Want) -> str | None:
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
