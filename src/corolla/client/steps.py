"""The steps of one session: how they are numbered, which are under way, and whether what comes back is right.

State moves only after success: a step that failed half-way keeps its number and is sent again, and whoever has it
already answers from what it kept. A step under way is *pushed* or not yet, and *answered* or still *live*. No I/O.

    trim, gather      noted, and ride on the next step
    begin             the steps of one run, numbered on from what was done
    next_to_push      the next of them that the window has room for
    commit            all are answered: position, rows and step number move
    abandon           the run failed: nothing moves
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from corolla.errors import BadInput
from corolla.models.finite import is_finite
from corolla.wire import messages as wire
from corolla.wire.tensors import DType, WireTensor

WINDOW_STEPS = 4
WINDOW_BYTES = 8 << 20
"""Steps, or bytes of them, that may be on the ring unanswered; one step always may. The ring ends in a sink: the
client reads while it writes, so a slow tail slows the head and no queue grows."""

MAX_SAID = 8
"""Row numbers that are repeated to whoever got them wrong."""

SLOWEST_LINK = 125_000
"""Bytes a second of a link that is hardly of any use; a home's upload has five times that and more."""


def share_of_window(num_hops: int) -> int:
    """Most bytes of a step, so that every server of the route has one and another is on its way to the first."""
    return WINDOW_BYTES // min(WINDOW_STEPS, num_hops + 1)


@dataclass(frozen=True, slots=True)
class StepInput:
    """New positions for all rows: `hidden` [rows, num_tokens, hidden_size] as it arrives at block 0."""

    hidden: WireTensor
    num_tokens: int
    position_ids: WireTensor | None = None
    token_ids: WireTensor | None = None


@dataclass(slots=True)
class Pending:
    """A step under way: pushed to the segment that begins at block `at`, its answer outstanding."""

    step: wire.Step
    num_tokens: int
    want: wire.Want
    at: int = 0
    timings: list[wire.HopTiming] = field(default_factory=list[wire.HopTiming])
    """Of the segments that it has passed."""
    is_pushed: bool = False
    output: wire.Output | None = None

    @property
    def is_live(self) -> bool:
        """On the ring, and still to be answered."""
        return self.is_pushed and self.output is None


class Steps:
    """What one session counts. `pending` are the steps of the present run, by number."""

    def __init__(
        self, max_tokens: int, max_rows: int, dtype: DType = "float32", hidden_size: int | None = None
    ) -> None:
        """`dtype`: of what travels. `hidden_size`: numbers for each position of a row; None: the first step says."""
        self.position = 0
        """Tokens held, in every row."""
        self.rows = 0
        """Sequences held; 0 before the first step."""
        self.next_no = 0
        """Number of the first step that is not done."""
        self.rewrites = 0
        """Counts trims and gathers: a history copied before one is not the history after it."""
        self.pending: dict[int, Pending] = {}
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._dtype: DType = dtype
        self._hidden_size = hidden_size
        self._trim_to: int | None = None
        self._gather: list[int] | None = None

    @property
    def last_answered(self) -> int:
        """Every step up to this one has given its output."""
        unanswered = [no for no, pending in self.pending.items() if pending.output is None]
        return min(unanswered, default=self.next_no + len(self.pending)) - 1

    @property
    def are_answered(self) -> bool:
        return all(pending.output is not None for pending in self.pending.values())

    def trim(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.position:
            raise BadInput(f"cannot trim to {num_tokens} tokens: the session holds {self.position}")
        if self._trim_to is not None or num_tokens < self.position:
            self._trim_to = num_tokens
            self.position = num_tokens
            self.rewrites += 1

    def gather(self, rows: Sequence[int]) -> None:
        num_rows = len(self._gather) if self._gather is not None else max(self.rows, 1)
        if not rows or not all(0 <= row < num_rows for row in rows):
            raise BadInput(f"cannot gather the rows {list(rows)[:MAX_SAID]}: the session holds {num_rows}")
        self._gather = list(rows) if self._gather is None else [self._gather[row] for row in rows]
        self.rewrites += 1

    def check(self, inputs: Sequence[StepInput], left_padding: list[int] | None = None) -> None:
        """Raises BadInput for what cannot fit, before anything is sent."""
        if not inputs or not all(entry.hidden.shape for entry in inputs):
            raise BadInput("there is nothing in what would go to the first block")
        num_rows = inputs[0].hidden.shape[0]
        for entry in inputs:
            self._check_shape(entry, num_rows)
        held_rows = self.rows if self._gather is None else len(self._gather)
        if held_rows not in (0, num_rows):
            raise BadInput(f"the session holds {held_rows} rows, this step has {num_rows}")
        if left_padding is not None and len(left_padding) != num_rows:
            raise BadInput(f"left padding of {len(left_padding)} rows for a step of {num_rows}")
        new_tokens = sum(entry.num_tokens for entry in inputs)
        if self.position + new_tokens > self._max_tokens:
            raise BadInput(
                f"the session was opened for {self._max_tokens} tokens; {self.position} are held, "
                f"{new_tokens} more do not fit"
            )
        if any(entry.hidden.shape[0] > self._max_rows for entry in inputs):
            raise BadInput(f"the session was opened for {self._max_rows} rows, not {inputs[0].hidden.shape[0]}")
        if not all(is_finite(entry.hidden) for entry in inputs):
            raise BadInput("there is NaN or infinity in what would go to the first block: nothing was sent")

    def _check_shape(self, entry: StepInput, num_rows: int) -> None:
        """The first server would refuse it, and all would have to be built anew: they may have gone different ways."""
        hidden = entry.hidden
        wanted = num_rows, entry.num_tokens, self._hidden_size or hidden.shape[-1]
        if hidden.shape != wanted or 0 in wanted or hidden.dtype != self._dtype:
            raise BadInput(
                f"hidden states {hidden.dtype} {list(hidden.shape)} for {entry.num_tokens} tokens of {num_rows} rows; "
                f"this session takes {self._dtype} [rows, tokens, {self._hidden_size or 'hidden_size'}]"
            )
        for name, ids in (("position ids", entry.position_ids), ("token ids", entry.token_ids)):
            if ids is not None and (ids.shape != wanted[:2] or ids.dtype != "int64"):
                raise BadInput(f"{name} {ids.dtype} {list(ids.shape)}; wanted int64 {list(wanted[:2])}")

    def begin(self, inputs: Sequence[StepInput], want: wire.Want, left_padding: list[int] | None) -> None:
        """These steps are under way from now on. `want` "last": of the last one only."""
        position = self.position
        for number, entry in enumerate(inputs):
            is_last = number == len(inputs) - 1
            step_want: wire.Want = want if is_last or want == "all" else "none"
            step = wire.Step(
                step_no=self.next_no + number,
                position=position,
                trim_to=self._trim_to if number == 0 else None,
                rows=self._gather if number == 0 else None,
                left_padding=left_padding,
                want=step_want,
                hidden=entry.hidden,
                position_ids=entry.position_ids,
                token_ids=entry.token_ids,
            )
            self.pending[step.step_no] = Pending(step, entry.num_tokens, step_want)
            position += entry.num_tokens

    def next_to_push(self) -> Pending | None:
        """The next step, if the window has room for it."""
        live = [pending for pending in self.pending.values() if pending.is_live]
        used_bytes = sum(pending.step.hidden.nbytes for pending in live)
        waiting = next((pending for pending in self.pending.values() if not pending.is_pushed), None)
        if waiting is None or not live:
            return waiting
        has_room = len(live) < WINDOW_STEPS and used_bytes + waiting.step.hidden.nbytes <= WINDOW_BYTES
        return waiting if has_room else None

    def was_never_begun(self, step_no: int) -> bool:
        return step_no >= self.next_no + len(self.pending)

    @property
    def slowest_way_s(self) -> float:
        """How long what is under way may take to travel."""
        return sum(pending.step.hidden.nbytes for pending in self.pending.values() if pending.is_live) / SLOWEST_LINK

    def commit(self) -> list[Pending]:
        """The run is done; its steps, in order."""
        done, self.pending = list(self.pending.values()), {}
        last = done[-1]
        self.next_no += len(done)
        self.position = last.step.position + last.num_tokens
        self.rows, _, self._hidden_size = last.step.hidden.shape
        self._trim_to = self._gather = None
        return done

    def abandon(self) -> None:
        """The run failed; what was noted for its first step stays noted."""
        self.pending = {}


def flaw_of(output: wire.Output, pending: Pending, want: wire.Want, *, num_blocks: int) -> str | None:
    """What is wrong with an output, by our own evidence; None: nothing. `num_blocks`: of the model."""
    step, hidden = pending.step, output.hidden
    if len(output.timings) > num_blocks:  # sent on with the step, too many would end the next server's stream
        return f"its output of step {step.step_no} tells of {len(output.timings)} hops over {num_blocks} blocks"
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
