"""Where the time of recent answers went: what "Why is it slow?" and `corolla trace` show.

Whoever generates calls `begin` for each answer, `took_route` when the servers change (`traced_route.py` makes the
value) and `saw_step` for each pass through them. Nothing here says what was asked or answered: only counts and
seconds. Memory is bounded: of a long answer the first steps and the latest ones stay, of many answers the latest.

    trace = traces.begin(model="SmolLM2", owner=key_id)
    trace.took_route(describe_route(...))
    trace.saw_step("prefill", tokens=41, total_s=0.21, local_s=0.01, chunks=session.chunk_timings)
    trace.finish("stop")
"""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from corolla.ids import PeerId

MAX_TRACES: Final = 64
FIRST_STEPS: Final = 32
LATEST_STEPS: Final = 480
"""Kept of one answer: what makes an answer slow to begin, and what it does now."""
MAX_ROUTES: Final = 16
"""Kept of one answer; a route changes when a server is lost or leaves."""

StepKind = Literal["prefill", "decode"]


class Timing(Protocol):
    """What a server says of a step (`wire.messages.HopTiming`)."""

    @property
    def queue_s(self) -> float: ...

    @property
    def compute_s(self) -> float: ...

    @property
    def send_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TracedHop:
    """A server of a route and the blocks `[start, end)` that it ran."""

    peer: PeerId
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TracedRoute:
    """A chain of servers, and what a decode step over it was expected to cost."""

    hops: tuple[TracedHop, ...]
    links_s: tuple[float | None, ...]
    """Half of each link's measured round trip: to each hop, then back to us. None: nobody has measured that link."""
    expected_s: float | None = None
    """Of one decode step; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds of one step at one hop."""

    queue_s: float
    """Waiting for the device."""
    compute_s: float
    send_s: float | None
    """From the end of the compute until the network had the result. Told with the next step; None: there was none."""
    wire_s: float | None
    """Travel to this hop, by the link's measured round trip (`split_wire`); None: nobody has measured it."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One pass through the route."""

    kind: StepKind
    tokens: int
    """New positions of each row."""
    chunks: int
    """More than one: the pieces of a prompt overlapped, so the parts may sum up to more than the whole."""
    route: int
    """Place in `AnswerTrace.routes`."""
    started_s: float
    """Since the answer began."""
    total_s: float
    local_s: float
    """Of it here: embeddings, head, sampling."""
    return_s: float | None
    """From the last hop back to us, as `HopTimes.wire_s`."""
    rest_s: float
    """What nobody measured: travel beyond those round trips, and waiting in event loops and buffers."""
    hops: tuple[HopTimes, ...]
    """Of each hop of the route; empty when a server was lost during the step, so that nobody knows."""


@dataclass(slots=True)
class AnswerTrace:
    """One answer, written to by whoever generates it."""

    id: str
    model: str
    owner: str
    """Whose answer it is (an API key's id): nobody else is shown it. Empty where there are no keys."""
    started_at: float
    """Wall time."""
    finish_reason: str | None = None
    """None while the answer is being written."""
    routes: list[TracedRoute] = field(default_factory=list[TracedRoute])
    runner_up: TracedRoute | None = None
    """The best other chain when the answer began."""
    num_steps: int = 0
    answered_tokens: int = 0
    decode_s: float = 0.0
    elapsed_s: float = 0.0
    """The sum of all steps: the pauses of a slow reader are nobody's fault here."""
    first_token_s: float | None = None
    _first: list[StepTrace] = field(default_factory=list[StepTrace])
    _latest: deque[StepTrace] = field(default_factory=lambda: deque[StepTrace](maxlen=LATEST_STEPS))
    _route: int = 0
    _has_new_route: bool = True
    """What the next step says of the sending of the one before is of other servers, or of a replay."""

    @property
    def steps(self) -> list[StepTrace]:
        """Those that were kept, in order."""
        return [*self._first, *self._latest]

    @property
    def num_first_steps(self) -> int:
        """How many of `steps` are the answer's first; those after them are its latest."""
        return len(self._first)

    @property
    def tokens_per_s(self) -> float | None:
        """Of the decode steps: what reading along feels like. None before the first one."""
        decoded = self.answered_tokens - 1
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None

    @property
    def route(self) -> TracedRoute | None:
        """The one in use, or last used."""
        return self.routes[self._route] if self.routes else None

    def took_route(self, route: TracedRoute, runner_up: TracedRoute | None = None) -> None:
        """The steps from here on go over these servers."""
        self._has_new_route = True
        if not self.routes:
            self.runner_up = runner_up
        if route in self.routes:
            self._route = self.routes.index(route)
        elif len(self.routes) < MAX_ROUTES:
            self.routes.append(route)
            self._route = len(self.routes) - 1
        else:
            self.routes[-1] = route  # of so many changes the one in use matters
            self._route = MAX_ROUTES - 1

    def saw_step(
        self, kind: StepKind, *, tokens: int, total_s: float, local_s: float, chunks: Sequence[Sequence[Timing]]
    ) -> None:
        """A step came round. `chunks`: the timings of each hop in order, for each piece that it went in."""
        assert self.routes, "steps go over a route"
        route, num_chunks = self.routes[self._route], max(1, len(chunks))
        if any(len(timings) != len(route.hops) for timings in chunks):
            chunks = ()  # a server was lost on the way, and with it who took how long
        if chunks and not self._has_new_route:
            self._settle([timing.send_s for timing in chunks[0]])
        self._has_new_route = False
        step = StepTrace(
            kind, tokens, num_chunks, self._route, self.elapsed_s, total_s, local_s,
            return_s=None, rest_s=0.0, hops=tuple(map(_summed, zip(*chunks, strict=True))),
        )  # fmt: skip
        (self._first if len(self._first) < FIRST_STEPS else self._latest).append(split_wire(step, route))
        self.num_steps += 1
        self.elapsed_s += total_s
        if kind == "decode":
            self.answered_tokens += 1
            self.decode_s += total_s
        else:
            self.answered_tokens = 1
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s

    def _settle(self, sends_s: Sequence[float]) -> None:
        """Now it is known how long the step before took to get away from each hop."""
        kept = self._latest or self._first
        if not kept or not kept[-1].hops:
            return
        hops = tuple(
            replace(hop, send_s=send_s + (hop.send_s or 0.0))
            for hop, send_s in zip(kept[-1].hops, sends_s, strict=True)
        )
        kept[-1] = split_wire(replace(kept[-1], hops=hops), self.routes[self._route])

    def finish(self, reason: str) -> None:
        """Nothing more comes: `stop`, `length`, `cancelled`, `error` …"""
        self.finish_reason = reason


def split_wire(step: StepTrace, route: TracedRoute) -> StepTrace:
    """The step with what it spent between machines placed on the links, as far as anybody can say.

    Clocks of different machines are not compared: of a single step only the whole ring's travel is known. Each link is
    given half of its measured round trip, less where that is more than was spent; what is left is `rest_s`.
    """
    there_s = sum(hop.queue_s + hop.compute_s + (hop.send_s or 0.0) for hop in step.hops)
    spent_s = max(0.0, step.total_s - step.local_s - there_s)
    links_s = route.links_s if step.hops and route.links_s else (None,) * (len(step.hops) + 1)
    measured_s = sum(link_s or 0.0 for link_s in links_s)
    share = min(1.0, spent_s / measured_s) if measured_s > 0 else 1.0
    wires_s = [None if link_s is None else share * link_s for link_s in links_s]
    return replace(
        step,
        hops=tuple(replace(hop, wire_s=wire_s) for hop, wire_s in zip(step.hops, wires_s[:-1], strict=True)),
        return_s=wires_s[-1],
        rest_s=max(0.0, spent_s - share * measured_s),
    )


def _summed(chunks: Sequence[Timing]) -> HopTimes:
    """One hop's times over all chunks of a prompt, which pass the hops one behind the other."""
    sends_s = [timing.send_s for timing in chunks[1:]]  # each tells of the one before it
    return HopTimes(
        sum(timing.queue_s for timing in chunks),
        sum(timing.compute_s for timing in chunks),
        sum(sends_s) if sends_s else None,
        None,
    )


class TraceStore:
    """The latest answers of one gateway. Belongs to its event loop."""

    def __init__(self, max_traces: int = MAX_TRACES) -> None:
        self._traces: deque[AnswerTrace] = deque(maxlen=max_traces)

    def begin(self, *, model: str, owner: str = "", now: float) -> AnswerTrace:
        """An answer begins at wall time `now`."""
        trace = AnswerTrace(f"trace-{secrets.token_hex(8)}", model, owner, now)
        self._traces.append(trace)
        return trace

    def find(self, trace_id: str, owner: str = "") -> AnswerTrace | None:
        """That answer, if it is still kept and this owner's."""
        return next((trace for trace in self._of(owner) if trace.id == trace_id), None)

    def latest(self, owner: str = "", count: int = MAX_TRACES) -> list[AnswerTrace]:
        """This owner's answers, the newest first."""
        return list(self._of(owner))[::-1][:count]

    def _of(self, owner: str) -> Iterator[AnswerTrace]:
        return (trace for trace in self._traces if trace.owner == owner)
