"""Where the client stands between two servers of a route, and what it has pushed to each part.

Servers push on to each other. At a border where two cannot, or where one of two is watched, the client passes on what
comes: there a *segment* begins, named by its first block (its head). The client keeps a journal for each; what went
over a border before it stood there is not in it, and then a lost head is *refed*: everything is replayed from block 0,
and what comes back from each segment goes on to the next. No I/O.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from corolla.client.hop import Hop
from corolla.client.recovery import Place
from corolla.client.steps import Pending, Steps
from corolla.ids import PeerId
from corolla.wire import messages as wire
from corolla.wire.journal import Journal
from corolla.wire.verbatim import VerbatimJournal

UNBOUNDED = 1 << 50
"""The client's own journal is bounded by the session's length: it holds what the user's prompt and text amount to."""


class Segments:
    """One session's. There always is one that begins at block 0."""

    def __init__(self, steps: Steps, *, exact: bool) -> None:
        self._steps = steps
        self._exact = exact
        self.heads: dict[int, Journal] = {0: self._new_journal()}
        """First block of each segment → what the client pushed there."""
        self._watched: dict[int, tuple[PeerId, ...]] = {}
        """First block of a segment that begins on suspicion → the two servers that it parts."""
        self._refed: set[int] = set()
        """Heads whose cache is rebuilt from what the segment before them gives back."""
        self._replaying: dict[tuple[int, int], wire.Step] = {}
        """(step_no, position) of steps that are replayed through the client, in their order."""
        self._places_in_line: dict[tuple[int, int], int] = {}
        """The same → how many come before it."""
        self._num_passed_on: dict[int, int] = {}
        """Head → how many of them it has got."""

    @property
    def nbytes(self) -> int:
        """Of hidden states kept."""
        return sum(journal.nbytes for journal in self.heads.values())

    def give_up(self) -> None:
        """Between two steps: keep nothing of what was pushed so far. A lost head cannot be rebuilt from now on."""
        for journal in self.heads.values():
            journal.skip(self._steps.position)

    def head_of(self, block: int) -> int:
        return max(head for head in self.heads if head <= block)

    def head_after(self, head: int) -> int | None:
        """First block of the segment after the one that begins here; None: that is the last."""
        return min((other for other in self.heads if other > head), default=None)

    def tail_of(self, head: int, hops: Sequence[Hop]) -> int:
        """Where in the route the segment that begins with this block ends."""
        following = self.head_after(head)
        return next((i for i, hop in enumerate(hops) if hop.end == following), len(hops) - 1)

    def want_at(self, pending: Pending, at: int) -> wire.Want:
        """A segment that is not the last must give every position: they all go on."""
        return pending.want if at == max(self.heads) else "all"

    def keep(self, step: wire.Step, at: int) -> None:
        """A step is pushed there. One that is pushed again is kept already."""
        journal = self.heads[at]
        if step.step_no > journal.last_step_no:
            journal.forgettable_from = self._steps.next_no
            journal.add(step)

    def cut_back(self) -> None:
        """Some server's state cannot be trimmed as the steps under way ask: what goes is not replayed to any."""
        for step in (pending.step for pending in self._steps.pending.values()):
            if step.trim_to is not None:
                for journal in self.heads.values():
                    journal.cut_back(step.step_no, step.trim_to)

    def part_at(self, start: int, places: Sequence[Place], *, on_suspicion: bool) -> None:
        """A segment begins at this block from now on; what came there before was not kept."""
        if start in self.heads:
            return
        if on_suspicion:
            self._watched[start] = _pair_at(places, start)
        journal = self.heads[start] = self._new_journal()
        journal.skip(self._steps.position)
        self.heads = dict(sorted(self.heads.items()))

    def is_parted_by_need(self, start: int) -> bool:
        """Whether a segment begins there because two servers could not reach each other, and not on suspicion."""
        return start > 0 and start in self.heads and start not in self._watched

    def join_at(self, start: int) -> None:
        """Between two steps: the server before this block pushes on to the one that begins with it again."""
        del self.heads[start]

    def follow(self, places: Sequence[Place]) -> None:
        """Where a new place lies across a border that the client kept, that border is gone; so is one that was only
        to watch two servers, when they are not neighbours any more."""
        starts = {place.start for place in places}
        seen = {start for start, pair in self._watched.items() if pair != _pair_at(places, start)}
        for head in [head for head in self.heads if head not in starts or head in seen]:
            del self.heads[head]
            self._watched.pop(head, None)
        for pending in self._steps.pending.values():
            pending.at = self.head_of(pending.at)

    # --- refeeding

    def begin_refeeding(self, places: Sequence[Place], *, last_answered: int) -> None:
        """See which heads have to be refed, now that these places are on the route."""
        gaps = [
            place.start
            for place in places
            if place.is_fresh and place.start in self.heads and not self.heads[place.start].covers(last_answered)
        ]
        self._refed = {head for head in self.heads if 0 < head <= max(gaps, default=0)}
        self._replaying, self._places_in_line, self._num_passed_on = {}, {}, {}
        for head in self._refed:
            self.heads[head] = self._new_journal()
        if self._refed:
            for pending in self._steps.pending.values():
                pending.at = 0

    def is_refed(self, head: int) -> bool:
        return head in self._refed

    def begin_replay(self, steps: list[wire.Step]) -> list[wire.Step]:
        """The steps of a replay from block 0, asking for what the heads behind are refed with."""
        if not self._refed:
            return steps
        steps = [replace(step, want="all") if step.replay else step for step in steps]
        self._replaying = {(step.step_no, step.position): step for step in steps if step.replay}
        self._places_in_line = {key: place for place, key in enumerate(self._replaying)}
        return steps

    def flaw_of_replayed(self, output: wire.Output, segment: int | None) -> str | None:
        """What is wrong with what a replayed step gave in this segment; None: nothing."""
        hidden = output.hidden
        if hidden is None:
            return None
        if len(hidden.shape) != 3:
            return f"its output of a replay is {hidden!r}, not [rows, tokens, hidden_size]"
        key = output.step_no, output.position - hidden.shape[1]
        step = self._replaying.get(key)
        if step is None:
            return None
        if (hidden.shape, hidden.dtype) != (step.hidden.shape, step.hidden.dtype):
            return f"its output of a replay is {hidden!r}, not {step.hidden!r}"
        head = None if segment is None else self.head_after(segment)
        if head in self._refed and self._places_in_line[key] > self._num_passed_on.get(head, 0):
            return f"its output of a replay of step {output.step_no} comes before others that precede it"
        return None

    def passed_on(self, output: wire.Output, segment: int, *, route_version: int) -> tuple[int, wire.Step] | None:
        """What a replayed step gave in this segment, as a step for the next one's head, and kept there; once."""
        assert output.hidden is not None
        key = output.step_no, output.position - output.hidden.shape[1]
        step, head = self._replaying.get(key), self.head_after(segment)
        if step is None or head is None or head not in self._refed:
            return None
        if self._places_in_line[key] != self._num_passed_on.get(head, 0):
            return None
        self._num_passed_on[head] = self._places_in_line[key] + 1
        goes_on = self.head_after(head) in self._refed
        step = replace(
            step, hidden=output.hidden, want="all" if goes_on else "none", route_version=route_version, timings=[]
        )
        journal = self.heads[head]
        if step.step_no > journal.last_step_no and (step.trim_to is not None or step.rows is not None):
            journal.add(step)
        else:
            journal.add_history(step)
        return head, step

    def _new_journal(self) -> Journal:
        return (VerbatimJournal if self._exact else Journal)(UNBOUNDED)


def _pair_at(places: Sequence[Place], start: int) -> tuple[PeerId, ...]:
    return tuple(place.peer for place in places if start in (place.start, place.end))
