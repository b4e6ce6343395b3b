"""What a peer keeps of the steps it pushed on, so that a lost neighbour's cache can be built anew.

The newest steps are kept as they were sent, to be sent again under the same number. Older ones are folded into the
history that they amount to: trims cut it, row gathers reorder it, new positions are appended. Replaying it is one
long prefill of what still counts, in chunks, and not a rerun of every step ever made.

    add(step)                  keep it; the oldest of more than `MAX_RECENT` is folded, unless it may yet be forgotten
    forget(from_step)          drop the newest: they never counted
    recent(from_step)          the newest steps from that number on, unchanged
    replay(from_position, …)   the history as steps marked `replay`, then nothing: `recent` follows

Hidden states [rows, tokens, size] only; bytes, no torch. One owner at a time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from corolla.wire.messages import Step
from corolla.wire.tensors import ITEM_BYTES, WireTensor

MAX_RECENT = 8
"""More than a session's window of unanswered steps: each of them can be sent again as it was."""
MAX_SEGMENTS = 64
"""So many new segments are merged at a time, so that a row gather touches few of them."""
RUN_BYTES = 8 << 20
"""Merged segments grow no longer than this, but for a replay: no step waits for a long copy, and what the cap drops at
once is not the whole history."""


@dataclass(slots=True)
class _Segment:
    """Consecutive positions; `rows[i]` is where row i lies in the tensors."""

    hidden: WireTensor
    position_ids: WireTensor | None
    token_ids: WireTensor | None
    rows: list[int]
    tokens: int


class Journal:
    """Steps pushed on by one peer for one session. Bounded: beyond `max_bytes` the oldest positions are dropped."""

    trims_at_once: ClassVar[bool] = True
    """Not every family can give back what a replay would give it too much."""

    def __init__(self, max_bytes: int) -> None:
        self.first_position = 0
        """Where the history begins; above 0 it has a gap and can no longer build a cache from nothing."""
        self.last_step_no = -1
        self.max_bytes = max_bytes
        self.forgettable_from: int | None = None
        """Steps from this number on may yet be forgotten: until it is higher, they are not folded."""
        self._recent: deque[Step] = deque()
        self._segments: list[_Segment] = []
        self._num_settled = 0
        """Of the segments, those that are not new: they were merged, or looked at for that."""
        self._num_tokens = 0
        """Of all segments."""
        self._folded_step_no = -1
        self._left_padding: list[int] | None = None
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of hidden states kept."""
        return self._nbytes

    @property
    def recent_nbytes(self) -> int:
        """Of them, those of the newest steps, which are not part of the history yet."""
        return sum(step.hidden.nbytes for step in self._recent)

    @property
    def num_pieces(self) -> int:
        """Pieces that `shed` drops one by one, but for the last."""
        return self._num_folded + len(self._recent)

    @property
    def history_end(self) -> int:
        """Positions in the history, those that were dropped included; the recent steps come after it."""
        return self.first_position + self._num_tokens

    def add(self, step: Step) -> None:
        """Keep a step as it was pushed on. Step numbers grow by one."""
        assert step.step_no > self.last_step_no, "a step is pushed on once"
        if step.trim_to is not None and self.trims_at_once:
            while self._recent:
                self._fold(self._recent.popleft())
            self._trim(step.trim_to)
        self.last_step_no = step.step_no
        self._recent.append(step)
        self._nbytes += step.hidden.nbytes
        while len(self._recent) > MAX_RECENT and not self._may_be_forgotten(self._recent[0]):
            self._fold(self._recent.popleft())
        self.shed(self.max_bytes)

    def add_history(self, step: Step) -> None:
        """Keep a replayed step: a part of the history, which may come in several under one number."""
        while self._recent:
            self._fold(self._recent.popleft())
        self.last_step_no = step.step_no
        self._nbytes += step.hidden.nbytes
        self._fold(step)
        self.shed(self.max_bytes)

    def shed(self, max_bytes: int) -> None:
        """Drop the oldest positions until no more bytes are kept than this; the newest step always is."""
        while self._nbytes > max_bytes and self.num_pieces > 1:
            if not self._num_folded:
                self._fold(self._recent.popleft())
            self._drop_oldest()

    def forget(self, from_step: int) -> None:
        """Drop the newest steps from this number on: they never counted."""
        while self._recent and self._recent[-1].step_no >= from_step:
            self._nbytes -= self._recent.pop().hidden.nbytes
        self.last_step_no = min(self.last_step_no, from_step - 1)

    def cut_back(self, step_no: int, num_tokens: int) -> None:
        """This step's trim is more than the receiver's state can do: what is replayed before it ends at so many
        positions. Here every trim has cut the history already."""

    def skip(self, num_tokens: int) -> None:
        """Positions up to here went another way: what was kept is no history any more."""
        self._recent.clear()
        self._set_segments([])
        self._nbytes = 0
        self.first_position = num_tokens

    def covers(self, step_no: int) -> bool:
        """Whether a cache that holds every step up to this one can be built from it, out of nothing."""
        has_no_gap = not self._recent or self._recent[0].position <= self.history_end
        return self.first_position == 0 and has_no_gap and self.last_step_no >= step_no

    def recent(self, from_step: int) -> list[Step]:
        """The newest steps, from this number on, as they were sent; those that are folded are not among them."""
        return [step for step in self._recent if step.step_no >= from_step]

    def replay(self, from_position: int, max_tokens: int, max_bytes: int, *, in_chunks: bool = True) -> Iterator[Step]:
        """The history from this position on, in chunks of at most `max_tokens` positions × rows and `max_bytes`.

        Without `in_chunks`, one from position 0 and single positions after it: some families drop the state that they
        hold when they take several onto it.
        """
        position = self.first_position
        for segment in list(self._segments):
            start = max(from_position - position, 0)
            while start < segment.tokens:
                chunk = _chunk(segment, start, max_tokens, max_bytes) if in_chunks or position + start == 0 else 1
                yield Step(
                    step_no=self._folded_step_no,
                    position=position + start,
                    left_padding=self._left_padding,
                    want="none",
                    replay=True,
                    hidden=cut(segment.hidden, segment.rows, start, chunk),
                    position_ids=cut_optional(segment.position_ids, segment.rows, start, chunk),
                    token_ids=cut_optional(segment.token_ids, segment.rows, start, chunk),
                )
                start += chunk
            position += segment.tokens

    def compact(self) -> None:
        """Merge what can be merged: called before a replay, whose steps then are as long as they may be."""
        self._set_segments(_merge_runs(self._segments))
        self._count()

    @property
    def _num_folded(self) -> int:
        """Pieces that the history is dropped in."""
        return len(self._segments)

    def _may_be_forgotten(self, step: Step) -> bool:
        return self.forgettable_from is not None and step.step_no >= self.forgettable_from

    def _fold(self, step: Step) -> None:
        if step.trim_to is not None:
            self._trim(step.trim_to)
        if step.rows is not None:
            for segment in self._segments:
                segment.rows = [segment.rows[row] for row in step.rows]
        if step.position > self.history_end:
            self._begin_at(step.position)
        self._left_padding = step.left_padding
        self._folded_step_no = step.step_no
        batch, tokens = step.hidden.shape[0], step.hidden.shape[1]
        self._segments.append(_Segment(step.hidden, step.position_ids, step.token_ids, list(range(batch)), tokens))
        self._num_tokens += tokens
        if len(self._segments) - self._num_settled > MAX_SEGMENTS:
            self._settle()
            self._count()

    def _settle(self) -> None:
        """Merge the new segments with each other, and with those before them that are no longer than they: whatever is
        copied once more lies in a segment at least twice as long then, so each position is copied few times."""
        settled = self._segments[: self._num_settled]
        for piece in _merge_runs(self._segments[self._num_settled :], RUN_BYTES):
            run, tokens, nbytes = [piece], piece.tokens, piece.hidden.nbytes
            while settled and settled[-1].tokens <= tokens and _can_merge(settled[-1], piece):
                nbytes += settled[-1].hidden.nbytes
                if nbytes > RUN_BYTES:
                    break
                tokens += settled[-1].tokens
                run.append(settled.pop())
            settled.append(_merge(run[::-1]))
        self._set_segments(settled)

    def _set_segments(self, segments: list[_Segment]) -> None:
        """These are all; none of them is new."""
        self._segments, self._num_settled = segments, len(segments)
        self._num_tokens = sum(segment.tokens for segment in segments)

    def _begin_at(self, position: int) -> None:
        """What lies before was never here, or not all of it. Else it would be forgotten when a step is folded, and what
        follows would move to where it is missing."""
        self._nbytes -= sum(segment.hidden.nbytes for segment in self._segments)
        self._set_segments([])
        self.first_position = position

    def _trim(self, num_tokens: int) -> None:
        while self._segments and self.history_end > num_tokens:
            last = self._segments[-1]
            surplus = self.history_end - num_tokens
            if surplus >= last.tokens:
                self._segments.pop()
                self._nbytes -= last.hidden.nbytes
                self._num_tokens -= last.tokens
            else:
                last.tokens -= surplus
                self._num_tokens -= surplus
        self._num_settled = min(self._num_settled, len(self._segments))
        self.first_position = min(self.first_position, num_tokens)

    def _drop_oldest(self) -> None:
        oldest = self._segments.pop(0)
        self.first_position += oldest.tokens
        self._num_tokens -= oldest.tokens
        self._nbytes -= oldest.hidden.nbytes
        self._num_settled = max(self._num_settled - 1, 0)

    def _count(self) -> None:
        self._nbytes = sum(segment.hidden.nbytes for segment in self._segments) + self.recent_nbytes


def _can_merge(first: _Segment, second: _Segment) -> bool:
    return (
        len(first.rows) == len(second.rows)
        and first.hidden.dtype == second.hidden.dtype
        and (first.position_ids is None) == (second.position_ids is None)
        and (first.token_ids is None) == (second.token_ids is None)
    )


def _merge_runs(segments: Sequence[_Segment], max_bytes: int | None = None) -> list[_Segment]:
    """Each as long as it may be; None: however long."""
    runs: list[list[_Segment]] = []
    nbytes = 0
    for segment in segments:
        nbytes += segment.hidden.nbytes
        if runs and _can_merge(runs[-1][-1], segment) and (max_bytes is None or nbytes <= max_bytes):
            runs[-1].append(segment)
        else:
            runs.append([segment])
            nbytes = segment.hidden.nbytes
    return [_merge(run) for run in runs]


def _merge(run: Sequence[_Segment]) -> _Segment:
    if len(run) == 1:
        return run[0]
    hidden = _join([(segment.hidden, segment.rows, segment.tokens) for segment in run])
    return _Segment(
        hidden,
        _join_optional([(segment.position_ids, segment.rows, segment.tokens) for segment in run]),
        _join_optional([(segment.token_ids, segment.rows, segment.tokens) for segment in run]),
        list(range(len(run[0].rows))),
        sum(segment.tokens for segment in run),
    )


def _join_optional(parts: Sequence[tuple[WireTensor | None, list[int], int]]) -> WireTensor | None:
    present = [(tensor, rows, tokens) for tensor, rows, tokens in parts if tensor is not None]
    return _join(present) if present else None


def _join(parts: Sequence[tuple[WireTensor, list[int], int]]) -> WireTensor:
    """The parts one after another along the tokens, each row from where it lies."""
    num_rows = len(parts[0][1])
    first = parts[0][0]
    data = b"".join(_slice(tensor, rows[row], 0, tokens) for row in range(num_rows) for tensor, rows, tokens in parts)
    return WireTensor(first.dtype, (num_rows, sum(tokens for *_, tokens in parts), *first.shape[2:]), data)


def _chunk(segment: _Segment, start: int, max_tokens: int, max_bytes: int) -> int:
    rows = len(segment.rows)
    token_bytes = rows * segment.hidden.nbytes // max(segment.hidden.shape[0] * segment.hidden.shape[1], 1)
    most = min(max_tokens // rows, max_bytes // max(token_bytes, 1))
    return min(segment.tokens - start, max(most, 1))


def cut_optional(tensor: WireTensor | None, rows: list[int], start: int, tokens: int) -> WireTensor | None:
    return None if tensor is None else cut(tensor, rows, start, tokens)


def cut(tensor: WireTensor, rows: list[int], start: int, tokens: int) -> WireTensor:
    """So many positions from `start` on, of these rows in this order."""
    if start == 0 and tokens == tensor.shape[1] and rows == list(range(tensor.shape[0])):
        return tensor
    parts = [_slice(tensor, row, start, tokens) for row in rows]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return WireTensor(tensor.dtype, (len(rows), tokens, *tensor.shape[2:]), data)


def _slice(tensor: WireTensor, row: int, start: int, tokens: int) -> memoryview:
    """The bytes of some positions of one row."""
    per_token = ITEM_BYTES[tensor.dtype]
    for size in tensor.shape[2:]:
        per_token *= size
    begin = (row * tensor.shape[1] + start) * per_token
    return memoryview(tensor.data)[begin : begin + tokens * per_token]
