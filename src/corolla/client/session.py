"""One generation over a ring of servers: pushes steps to the head of the route, and takes what its tail gives.

Every server pushes on to the next; where two cannot reach each other, the client passes that link's activations on
itself. What is counted (`steps.py`) moves only after success: whatever goes wrong on the way is mended beside a step
that waits (`mending.py`), and its output comes as if nothing had been.

    session.py   one run after another: push what the window allows, take what comes
    steps.py     positions, numbers, what is under way
    ring.py      who has which place, and how a route is taken; hop.py: one server of it; replays.py: what is sent again
    mending.py   what to do about faults; recovery.py decides, substitutes.py finds others
    moving.py    leaving a server that still serves
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corolla.client.access import SwarmAccess
from corolla.client.config import ClientConfig
from corolla.client.hop import Hop
from corolla.client.mending import Mender
from corolla.client.moving import Mover
from corolla.client.recovery import Place, WrongAnswer
from corolla.client.ring import Ring
from corolla.client.router import ServedModel
from corolla.client.slowness import could_be
from corolla.client.steps import StepInput, Steps, flaw_of
from corolla.client.substitutes import Substitutes
from corolla.clock import loop_time
from corolla.errors import BadInput, BadUpstream, Faulty, HopFailed, LinkDown, RemoteProtocolError, SwarmError
from corolla.ids import PeerId, short
from corolla.models.finite import is_finite
from corolla.wire import messages as wire
from corolla.wire.tensors import DType, WireTensor

log = logging.getLogger(__name__)

NOTE_TIMES_S = 0.002
"""After a step its times are noted, when its caller is at work again: at once, it would wait for that."""


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One server of the route in use and the blocks `[start, end)` it runs."""

    peer_id: PeerId
    start: int
    end: int


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
        prompt_tokens: int = 1,
        wire_dtype: DType,
    ) -> None:
        self.model = model
        self.timings: list[wire.HopTiming] = []
        """Of the last step, one for each hop in order."""
        self.chunk_timings: list[list[wire.HopTiming]] = []
        """The same for every step of the last run, which has several when a prompt goes in chunks."""
        self.false_alarms = 0
        """How often a server was given up for its silence, and was heard again. Each cost time, and no text."""
        self.survives_any_loss = True
        """False: the journal was given up; should the first server be lost, the text has to be sent again."""
        self._config = config
        self._router = swarm.router(model)
        self._journals = swarm.journals
        self._steps = steps = Steps(max_tokens, max_rows, wire_dtype, model.hidden_size)
        self._ring = ring = Ring(
            swarm, model, self, steps, max_tokens=max_tokens, max_rows=max_rows, wire_dtype=wire_dtype,
            exact=config.exact,
        )  # fmt: skip
        self._lock = asyncio.Lock()
        """Held while steps are under way."""
        # Later too: the text crosses a substitute's links as the prompt did, when it is replayed.
        cost = config.cost.for_session(prompt_tokens=prompt_tokens, max_tokens=max_tokens, rows=max_rows)
        substitutes = Substitutes(swarm, model, config, tokens_needed=max_tokens * max_rows, cost=cost)
        self._mover = Mover(swarm, model, ring, steps, substitutes, self._lock)
        self._mender = Mender(ring, steps, substitutes, self._mover, wait_s=config.wait_for_servers_s)
        self._news = asyncio.Event()
        """An output or a fault has come."""
        self._is_dirty = False
        """A run failed: servers may have gone further than we count."""
        self._is_closed = False

    # --- what the owner sees

    @property
    def position(self) -> int:
        """Tokens held, in every row."""
        return self._steps.position

    @property
    def rows(self) -> int:
        """Sequences held; 0 before the first step."""
        return self._steps.rows

    @property
    def recoveries(self) -> int:
        """How often the route was changed since the session began."""
        return max(self._ring.num_taken - 1, 0)

    @property
    def route(self) -> list[RouteHop]:
        return [RouteHop(place.peer, place.start, place.end) for place in self._ring.places]

    @property
    def through_client(self) -> list[int]:
        """First blocks of the servers that the one before them cannot reach: there the client stands between."""
        return [start for start in self._ring.heads if start > 0]

    @property
    def max_chunk_tokens(self) -> int:
        """Most positions × rows that every server of the route takes in one step."""
        return min(opened.max_chunk_tokens for opened in self._ring.terms)

    @property
    def max_chunk_bytes(self) -> int:
        return min(opened.window_bytes for opened in self._ring.terms)

    @property
    def prefill_in_chunks(self) -> bool:
        return all(opened.prefill_in_chunks for opened in self._ring.terms)

    @property
    def is_exact(self) -> bool:
        """Bit for bit the same through every recovery."""
        return self._config.exact

    @property
    def journal_bytes(self) -> int:
        """What is kept of the hidden states that were pushed, to rebuild lost servers from."""
        return self._ring.segments.nbytes

    @property
    def is_idle(self) -> bool:
        """No run and no move is under way."""
        return not self._lock.locked() and not self._mover.is_busy

    def give_up_journal(self) -> None:
        """Keep nothing of what was pushed so far (`client/journals.py`)."""
        self._ring.segments.give_up()
        self.survives_any_loss = False

    @property
    def needs_token_ids(self) -> bool:
        return any(opened.needs_token_ids for opened in self._ring.terms)

    async def start(self) -> None:
        """Find the route and open every hop. Raises NoRoute, Refused or HopFailed; then nothing is held."""
        try:
            await self._mender.start()
        except BaseException:
            self.close()
            raise
        if self._is_closed:  # meanwhile, by its owner; some servers may have been reached after that
            self._ring.close()
            raise BadInput("the session was closed while it began")
        log.info("route", extra={"hops": ", ".join(f"{short(h.peer_id)} {h.start}:{h.end}" for h in self.route)})

    async def begin(
        self, cut: Callable[[], Sequence[StepInput]], *, want: wire.Want, left_padding: list[int] | None = None
    ) -> list[WireTensor | None]:
        """`start`, and `run` what `cut` gives once the route is known.

        Its first steps follow right behind `Open` where all servers of the route have told this client before what
        they take; elsewhere they wait for the answers. Raises what the two raise; `is_closed` says of which.
        """
        async with self._lock:
            began = loop_time()

            def begin_early() -> None:
                self._admit(inputs := cut(), left_padding)
                self._steps.begin(inputs, want, left_padding)
                self._push()

            self._ring.on_head_reached = begin_early
            try:
                await self.start()
            except BaseException:
                self._steps.abandon()
                raise
            finally:
                self._ring.on_head_reached = None
            if not self._steps.pending:
                self._admit(inputs := cut(), left_padding)
                self._steps.begin(inputs, want, left_padding)
            return await self._finish(began)

    def trim(self, num_tokens: int) -> None:
        """Forget all positions from `num_tokens` on. Costs nothing: it rides on the next step."""
        self._steps.trim(num_tokens)

    def gather(self, rows: Sequence[int]) -> None:
        """Before the next step, row i of every cache becomes the present row `rows[i]`. Raises BadInput for others."""
        self._steps.gather(rows)

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
        our own mistakes, Overloaded when all sessions of this client keep too much in their journals; `position` then
        is what it was, and the session can go on. Raises SessionLost when it gave its journal up and lost the head, and
        NetworkLost when what is gone is this side's own network.
        """
        async with self._lock:
            if self._is_closed:
                raise BadInput("the session is closed; open another")
            self._admit(inputs, left_padding)
            try:
                await self._prepare()
            except BaseException:
                self._is_dirty = True
                raise
            self._steps.begin(inputs, want, left_padding)
            return await self._finish(loop_time())

    def close(self) -> None:
        """Give the session's place on every server back. May be called twice."""
        self._is_closed = True
        self._journals.forget(self)
        self._mover.close()
        self._ring.close()

    @property
    def is_closed(self) -> bool:
        """Nothing is held on any server, and nothing can be run any more."""
        return self._is_closed

    # --- a run

    def _admit(self, inputs: Sequence[StepInput], left_padding: list[int] | None) -> None:
        """Raises BadInput for what cannot fit, Overloaded where all sessions keep too much."""
        self._steps.check(inputs, left_padding)
        num_bytes = sum(entry.hidden.nbytes for entry in inputs)
        self._journals.claim(self, num_bytes * len(self._ring.heads))

    async def _finish(self, began: float) -> list[WireTensor | None]:
        """Drive the steps that were begun, not before `began`, until all are answered; what they gave."""
        try:
            await self._drive()
        except BaseException:
            self._is_dirty = True
            self._steps.abandon()
            raise
        done = self._steps.commit()
        self.chunk_timings = [pending.output.timings for pending in done if pending.output is not None]
        self.timings = self.chunk_timings[-1]
        later = asyncio.get_running_loop().call_later
        took_s = loop_time() - began
        later(NOTE_TIMES_S, self._note_times, self._ring.places, self.timings, done[-1].num_tokens, took_s)
        return [None if pending.output is None else pending.output.hidden for pending in done]

    def _push(self) -> None:
        """What the window allows."""
        while (pending := self._steps.next_to_push()) is not None:
            self._ring.push(pending, 0, pending.step.hidden)
            pending.is_pushed = True

    async def _prepare(self) -> None:
        if self._is_dirty:
            await self._mender.rebuild()
            self._is_dirty = False
        else:
            await self._mender.prepare()

    async def _drive(self) -> None:
        """Push what the window allows, take what comes, mend what breaks, until every step is answered."""
        while not self._steps.are_answered:
            self._news.clear()
            if self._mender.has_faults:
                await self._mender.mend()
                continue
            self._push()
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        """For an output or a fault. What has come to nothing for too long is taken for one.

        How long that is grows with the bytes under way: a slow link brings them, and shows no other sign of life.
        """
        look_s, way_s, began = self._config.liveness.dead_after_s, self._steps.slowest_way_s, loop_time()
        quiet_at = began + way_s + (look_s if self._ring.has_links else 3 * look_s)
        deadline = began + way_s + self._config.step_timeout_s
        while (now := loop_time()) < deadline:
            next_look = min(now + look_s, deadline, quiet_at if now < quiet_at else deadline)
            try:
                async with asyncio.timeout(next_look - now):
                    await self._news.wait()
                    return
            except TimeoutError:
                lives = [hop.link.life for hop in self._ring.hops]
                if loop_time() >= quiet_at and all(life.is_answering and life.peer_queue_s == 0 for life in lives):
                    await self._mender.on_quiet()
                    return
                if (stuck := self._mover.pick_stuck()) is not None:
                    await self._mender.on_stuck(stuck)
        self._mender.on_timeout(deadline - began)

    def _note_times(
        self, places: Sequence[Place], timings: Sequence[wire.HopTiming], num_tokens: int, took_s: float
    ) -> None:
        """What a step over these places, which `took_s` by our clock, says of their servers."""
        if len(timings) != len(places):
            return  # of a step that was under way while the route changed: whose times they are is not sure
        if not could_be(timings, took_s):  # the tail could have them all speak ill of the others
            log.info("a step's times cannot be", extra={"peer": short(places[-1].peer), "took_s": took_s})
            return
        for place, timing in zip(places, timings, strict=True):
            self._router.saw_step(place.peer, timing, num_blocks=place.end - place.start, num_tokens=num_tokens)
        if num_tokens == 1 and places is self._ring.places:
            self._mover.on_decode_step(timings, self.rows)

    # --- what hops report (`Listener`)

    def on_output(self, hop: Hop, output: wire.Output) -> None:
        if output.route_version != self._ring.version:
            return  # of a route that is no longer in use: it may have been a part of the way then, and not the end
        if output.replay:
            self._ring.pass_replay_on(hop, output)
            return
        if self._steps.was_never_begun(output.step_no):
            self._ring.drop(hop, HopFailed(hop.peer, f"it answers step {output.step_no}, which was never sent"))
            return
        pending = self._steps.pending.get(output.step_no)
        if pending is None or pending.output is not None or hop not in self._ring.hops:
            return  # a late or second answer: nobody waits for it
        if self._ring.segment_of(hop) != pending.at:
            return
        want = self._ring.segments.want_at(pending, pending.at)
        problem = flaw_of(output, pending, want, num_blocks=self.model.num_blocks)
        if problem is not None and not self._ring.feeds(hop):
            self._mender.on_fault(hop, WrongAnswer(problem))
            self._news.set()
            return
        if problem is None and output.hidden is not None and not is_finite(output.hidden):
            # Its own, though others come before it: it would have refused to take that in.
            problem = f"there is NaN or infinity in its output of step {output.step_no}"
        if problem is not None:
            self._ring.drop(hop, HopFailed(hop.peer, problem))
            return
        following = self._ring.segments.head_after(pending.at)
        if following is not None:
            assert output.hidden is not None
            pending.timings = output.timings
            self._ring.push(pending, following, output.hidden)
        else:
            pending.output = output
            self._mender.on_answer()
            self._news.set()

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        self._ring.progress.set()  # it may have stood by: whoever waits for it looks at its error
        if self._is_closed:
            return
        if hop not in self._ring.hops:
            if self._ring.standby.get(hop.peer) is hop:
                hop.fail(error)  # what it refused it lacks for good: it will never catch up
            return
        log.info("fault", extra={"peer": short(hop.peer), "reason": str(error)[:200]})
        if isinstance(error, LinkDown):
            if (standby := self._ring.standby.get(error.peer)) is not None:
                self._router.saw_link_fault(hop.peer, error.peer)
                standby.fail(error)
                return
            if not self._ring.pushes_to(hop, error.peer):
                return  # old news
            if not self._ring.has_lost(error.peer):  # else it is not the link that is to blame
                self._router.saw_link_fault(hop.peer, error.peer)
        elif isinstance(error, HopFailed | RemoteProtocolError | Faulty):
            self._router.saw_fault(hop.peer)
        elif isinstance(error, BadUpstream) and (before := self._ring.server_before(hop)) is not None:
            self._router.saw_link_fault(before, hop.peer)
        self._mender.on_fault(hop, error)
        self._news.set()

    def on_drain(self, hop: Hop, deadline_s: float) -> None:
        self._mover.on_drain(hop.peer, deadline_s)

    def on_progress(self, hop: Hop) -> None:
        self._ring.progress.set()

    def on_false_alarm(self, hop: Hop) -> None:
        self.false_alarms += 1
