"""A journal for exact sessions: every step as it was, however long ago, so that a replay computes what was computed.

`wire/journal.py` folds old steps into the history that they amount to, and replays that in long steps. Kernels round
differently with a step's shape, so in other formats than float32 a cache that is built so differs in its last bits.
Here a replay repeats the steps one by one, with their trims and gathers. It costs as many steps as the text had, and
keeps positions that were trimmed away. Only a trim that the receiver cannot do cuts them off (`cut_back`): then every
cache is built anew, from then on by the steps that are left.
"""

from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from corolla.wire.journal import Journal, cut, cut_optional
from corolla.wire.messages import Step


class VerbatimJournal(Journal):
    """Bounded like the other; beyond that all of it is a gap: no cache can be built from the rest."""

    trims_at_once = False

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._log: list[Step] = []
        """All that is older than the recent ones."""

    @property
    def history_end(self) -> int:
        return _end_of(self._log[-1]) if self._log else self.first_position

    def cut_back(self, step_no: int, num_tokens: int) -> None:
        older = [*self._log, *(step for step in self._recent if step.step_no < step_no)]
        rows: list[int] | None = None
        while older and older[-1].position >= num_tokens:
            rows = _gathered(older.pop().rows, rows)
        if older:
            last = _shortened(older.pop(), num_tokens, rows, has_rows=bool(older))
            older.append(replace(last, step_no=step_no - 1))  # the trimming one is its next
        self._log, self._recent = older, deque(step for step in self._recent if step.step_no >= step_no)
        self._nbytes = sum(step.hidden.nbytes for step in (*self._log, *self._recent))
        self.first_position = min(self.first_position, num_tokens)

    def skip(self, num_tokens: int) -> None:
        super().skip(num_tokens)
        self._log.clear()

    def replay(self, from_position: int, max_tokens: int, max_bytes: int, *, in_chunks: bool = True) -> Iterator[Step]:
        """The steps after the one that ended at this position; no other ones, whatever the receiver takes."""
        first = 0
        if from_position > 0:
            ends = [_end_of(step) for step in (*self._log, *self._recent)]
            first = max((index + 1 for index, end in enumerate(ends) if end == from_position), default=0)
        for step in self._log[first:]:
            yield replace(step, want="none", replay=True)

    def compact(self) -> None:
        """Nothing is merged."""

    @property
    def _num_folded(self) -> int:
        return len(self._log)

    def _fold(self, step: Step) -> None:
        if step.trim_to == 0 and step.rows is None:
            self._nbytes -= sum(older.hidden.nbytes for older in self._log)
            self._log.clear()
            self.first_position = 0
        if step.position > self.history_end:
            self._begin_at(step.position)
        self._log.append(step)

    def _begin_at(self, position: int) -> None:
        self._nbytes -= sum(older.hidden.nbytes for older in self._log)
        self._log.clear()
        self.first_position = position

    def _drop_oldest(self) -> None:
        self.first_position = self.history_end
        self._nbytes -= sum(step.hidden.nbytes for step in self._log)
        self._log.clear()


def _gathered(first: list[int] | None, then: list[int] | None) -> list[int] | None:
    """Two row gathers as one; None changes nothing."""
    return then if first is None else first if then is None else [first[row] for row in then]


def _shortened(step: Step, num_tokens: int, rows: list[int] | None, *, has_rows: bool) -> Step:
    """The step up to `num_tokens` positions, with its rows as `rows` gathers them. `has_rows`: there are others before
    it, which it has to gather too."""
    tokens = min(step.hidden.shape[1], num_tokens - step.position)
    order = list(range(step.hidden.shape[0])) if rows is None else rows
    padding = step.left_padding
    return replace(
        step,
        rows=_gathered(step.rows, rows) if has_rows else None,
        left_padding=None if padding is None else [padding[row] for row in order],
        hidden=cut(step.hidden, order, 0, tokens),
        position_ids=cut_optional(step.position_ids, order, 0, tokens),
        token_ids=cut_optional(step.token_ids, order, 0, tokens),
    )


def _end_of(step: Step) -> int:
    return step.position + step.hidden.shape[1]
