"""Where the time of recent answers went: what "Why is it slow?" and `corolla trace` show.

Whoever generates calls `begin` for each answer, `took_route` when the servers change (`traced_route.py` makes the
value) and `saw_step` for each pass through them. Nothing here says what was asked or answered: only counts and
seconds. Memory is bounded: of a long answer the first steps and the latest ones stay, of many answers the latest.

    trace = traces.begin(model="SmolLM2", owner=key_id)
    trace.took_route(describe_route(...))
    trace.saw_step("prefill", tokens=41, total_s=0.21, local_s=0.01, timings=session.timings)
    trace.finish("stop")
"""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    links_s: tuple[float, ...]
    """Expected one-way delays: to each hop, then back to us. Empty: nobody knows."""
    expected_s: float | None = None
    """Of one decode step; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds of one step at one hop: waiting for the device, computing, and travelling to this hop (a share of the
    whole ring's travel: `split_wire`)."""

    queue_s: float
    compute_s: float
    wire_s: float


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
    return_s: float
    """From the last hop back to us."""
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
        self, kind: StepKind, *, tokens: int, total_s: float, local_s: float, timings: Sequence[Timing], chunks: int = 1
    ) -> None:
        """A step came round. `timings`: of each hop in order (`sum_chunks`, where a prompt went in several)."""
        assert self.routes, "steps go over a route"
        route = self.routes[self._route]
        if len(timings) != len(route.hops):
            timings = ()  # a server was lost on the way, and with it who took how long
        hops_s = sum(timing.queue_s + timing.compute_s for timing in timings)
        wire_s = split_wire(total_s - local_s - hops_s, len(timings), route)
        hops = tuple(
            HopTimes(timing.queue_s, timing.compute_s, travel_s)
            for timing, travel_s in zip(timings, wire_s[:-1], strict=True)
        )
        step = StepTrace(kind, tokens, chunks, self._route, self.elapsed_s, total_s, local_s, wire_s[-1], hops)
        (self._first if len(self._first) < FIRST_STEPS else self._latest).append(step)
        self.num_steps += 1
        self.elapsed_s += total_s
        if kind == "decode":
            self.answered_tokens += 1
            self.decode_s += total_s
        else:
            self.answered_tokens = 1
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s

    def finish(self, reason: str) -> None:
        """Nothing more comes: `stop`, `length`, `cancelled`, `error` …"""
        self.finish_reason = reason


def split_wire(wire_s: float, num_hops: int, route: TracedRoute) -> list[float]:
    """What a step spent between machines, as a share for each link: to every hop, then back.

    Servers' clocks are not compared, so only the sum is measured; round trips known before say how it was shared.
    """
    num_links, wire_s = num_hops + 1, max(0.0, wire_s)
    known = route.links_s if len(route.links_s) == num_links and sum(route.links_s) > 0 else (1.0,) * num_links
    return [wire_s * link_s / sum(known) for link_s in known]


def sum_chunks(chunks: Sequence[Sequence[Timing]]) -> list[HopTimes]:
    """Each hop's times over all chunks of a prompt, which pass the hops one behind the other."""
    if len({len(chunk) for chunk in chunks}) != 1:
        return []  # the route changed between them
    return [
        HopTimes(sum(t.queue_s for t in hop), sum(t.compute_s for t in hop), 0.0) for hop in zip(*chunks, strict=True)
    ]


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
