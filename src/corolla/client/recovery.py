"""What to do when a server of the route is lost: pure decisions, which `client/mending.py` carries out.

A route is a list of `Place`s: one server each, for consecutive blocks. Places are linked server to server, except
at the borders where two servers cannot reach each other: there the client passes activations on itself. The parts
between such borders are the route's *segments*; the client pushes to each one's head and hears from its tail.

    a fault              → `remedy_for`, `remedy_for_link`: what it calls for
    lost places          → `replace_lost`: substitutes for just their blocks; everyone else keeps the cache
    what all hold        → `must_rebuild`: places that have to begin afresh, since nobody before them can replay
    what is missing      → `plan_resends`: who sends what again, from where

In every decision a step is either *answered* (its output has come) or *live* (it still must give one).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from corolla.errors import (
    BadUpstream,
    Faulty,
    HopFailed,
    JournalGap,
    NeedsReplay,
    OutOfOrder,
    Overloaded,
    RemoteProtocolError,
    SessionLost,
    SwarmError,
    Unsupported,
)
from corolla.ids import PeerId
from corolla.swarm.route import Route


@dataclass(frozen=True, slots=True)
class Place:
    """One server's place in the route."""

    peer: PeerId
    start: int
    end: int
    is_fresh: bool = False
    """It holds nothing of the session and must be rebuilt."""
    catches_up: bool = False
    """It has stood by, and holds a beginning of what it needs."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a place said it holds when it took the new route."""

    position: int
    last_step_no: int
    journal_from: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Tell the place at `index` to send on what the one after it lacks; -1 is the client itself."""

    index: int
    from_position: int | None
    from_step: int


class WrongAnswer(SwarmError):
    """An output is not what it must be, and has come by way of several servers."""


Remedy = Literal["repeat", "rebuild", "rebuild all", "replace", "leave", "ban", "part", "watch", "give up"]
"""Take the same route again after a pause, so that the step is sent again; build that server's cache anew, or
everybody's; put another in the place of one that is lost, of one that says it is no good, or of one that was wrong;
stand between it and the server before it, or between all of its segment, to see for ourselves who is wrong; or tell the
user."""
LinkRemedy = Literal["none", "replace", "repeat", "part"]
"""Old news; the other one is lost, and with it the link; let the two try again; or stand between them from now on."""


def remedy_for(fault: SwarmError, *, is_fed_by_us: bool, again: bool) -> Remedy:
    """What a server's fault calls for. "give up": our own mistake, for which nobody is banned and nothing retried.

    `is_fed_by_us`: its steps come from the client, which has looked at them, and not from another server. What a
    server says of steps that another one sent speaks against neither; once the client stands between the two, the
    next wrong thing comes to it, or is called wrong though it was right, and that is evidence.
    `again`: recoveries have brought no answer for some time.
    """
    match fault:
        case Overloaded():  # a full line is no failure
            return "repeat"
        case Faulty():  # so it says of itself
            return "leave"
        case WrongAnswer():
            return "watch"
        case BadUpstream():
            return "ban" if is_fed_by_us else "part"
        case Unsupported() if not is_fed_by_us:  # our own mistakes are found by the first server, or before
            return "part"
        case OutOfOrder() | SessionLost() if again and not is_fed_by_us:
            return "part"
        case NeedsReplay():  # its state cannot go back, and so with the others: they hold blocks of the same model
            return "rebuild all"
        case JournalGap() | OutOfOrder():  # it cannot get there from what it holds
            return "rebuild"
        case SessionLost() | HopFailed() | RemoteProtocolError():
            return "replace"
        case _:
            return "give up"


def remedy_for_link(
    places: Sequence[Place], lost: Collection[int], index: int, peer: PeerId, *, again: bool
) -> LinkRemedy:
    """What it calls for that the server at `index` cannot reach `peer`; `again`: not for the first time."""
    following = index + 1
    if following >= len(places) or places[following].peer != peer:
        return "none"
    if following in lost:
        return "replace"
    return "part" if again else "repeat"


def lost_runs(places: Sequence[Place], lost: Collection[int]) -> list[range]:
    """The blocks of lost places, neighbours joined: each run is replaced as a whole, by one server or several."""
    runs: list[range] = []
    for index, place in enumerate(places):
        if index not in lost:
            continue
        if runs and runs[-1].stop == place.start:
            runs[-1] = range(runs[-1].start, place.end)
        else:
            runs.append(range(place.start, place.end))
    return runs


def replace_lost(places: Sequence[Place], lost: Collection[int], substitutes: Mapping[int, Route]) -> list[Place]:
    """The places after recovery; `substitutes` by the first block of each lost run."""
    kept: list[Place] = []
    for index, place in enumerate(places):
        if index not in lost:
            kept.append(place)
        elif place.start in substitutes:
            hops = substitutes[place.start].hops
            kept.extend(Place(hop.peer, hop.start, hop.end, is_fresh=True) for hop in hops)
    return kept


def must_rebuild(
    places: Sequence[Place], held: Sequence[Held], heads: Mapping[int, bool], last_answered: int
) -> set[int]:
    """Places that must begin afresh.

    `heads`: first block of each segment → whether the client's journal of what it pushed there is whole. A place
    that lacks answered steps has lost its state and is rebuilt; so is each place between a rebuilt one and the
    nearest before it that can replay everything, because only a recomputation can feed what follows.
    """
    rebuilt = {
        index
        for index, (place, state) in enumerate(zip(places, held, strict=True))
        if place.is_fresh or (state.last_step_no < last_answered and not place.catches_up)
    }
    for index in sorted(rebuilt, reverse=True):
        if not heads.get(places[index].start, True):
            return rebuilt | set(range(index))  # only the client can pass replays on there: from the very beginning
        while index > 0 and not _can_be_fed(index, places, held, heads):
            index -= 1
            if index in rebuilt:
                break
            rebuilt.add(index)
    return rebuilt


def _can_be_fed(index: int, places: Sequence[Place], held: Sequence[Held], heads: Mapping[int, bool]) -> bool:
    """Whether the one before this place can replay the whole history to it."""
    start = places[index].start
    return heads[start] if start in heads else held[index - 1].journal_from == 0


def mark_fresh(places: Sequence[Place], rebuilt: Collection[int]) -> list[Place]:
    return [replace(place, is_fresh=place.is_fresh or index in rebuilt) for index, place in enumerate(places)]


def plan_resends(places: Sequence[Place], held: Sequence[Held], heads: Collection[int]) -> list[Resend]:
    """What each place that keeps its cache sends on again, so that all have what the first of them has.

    A fresh place needs none: it pushes on what it recomputes.
    """
    orders: list[Resend] = []
    for index, place in enumerate(places[:-1]):
        following = places[index + 1]
        if place.is_fresh or following.start in heads:
            continue
        if following.is_fresh or following.catches_up:
            orders.append(Resend(index, held[index + 1].position, 0))
        elif held[index + 1].last_step_no < held[index].last_step_no:
            orders.append(Resend(index, None, held[index + 1].last_step_no + 1))
    return orders
