"""A server's session as a pure state machine: what to do with the step that just came.

`server/steps.py` calls this for each step and carries the action out; nothing here waits, computes or
touches a tensor's bytes. One session is one row of this table:

    event                                   action                     state afterwards
    step_no == last + 1, all checks pass    Compute                    position, rows and last_step_no move
    step_no <= last, kept                   AnswerFromJournal          unchanged (the newest few are kept)
    step_no <= last, no longer kept         Refuse(JournalGap)         unchanged
    step_no >  last + 1                     Refuse(OutOfOrder)         unchanged; taken at position 0 by who has none
    same step_no, another position          Break                      the stream ends: the peer broke the rules
    replay, at the position held            Compute                    the same; step_no may jump ahead
    replay of what is held                  Ignore                     unchanged
    older route_version                     Ignore                     unchanged
    newer route_version                     Wait                       unchanged; unread until its Open has come
    bad position, too long, bad shape, …    Refuse(Unsupported)        unchanged
    Open with a higher route_version        (`on_reopen`)              route moves; what is held stays, or all goes

Every step is counted by `step_no` and not by position: a row gather applied twice corrupts, and a trimmed
session uses a position again for another token.
"""

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from corolla.errors import JournalGap, NeedsReplay, OutOfOrder, Refused, RemoteProtocolError, Unsupported
from corolla.ids import PeerId, SessionId
from corolla.wire.journal import MAX_RECENT
from corolla.wire.messages import MAX_HOPS, Open, Step


class SessionState(msgspec.Struct, frozen=True):
    """What a server knows of a session, besides its cache.

    Not a dataclass: a step makes a new one, and msgspec's `replace` takes a tenth of the time.
    """

    session: SessionId
    owner: PeerId
    """The client: it alone opens, re-routes and closes."""
    upstream: PeerId
    """Whose data stream may carry steps in this route version."""
    route_version: int
    max_tokens: int
    max_rows: int
    max_chunk_tokens: int
    hidden_size: int
    needs_token_ids: bool = False
    can_trim: bool = True
    prefill_in_chunks: bool = True
    last_step_no: int = -1
    position: int = 0
    rows: int = 0
    """Rows of the cache; 0 before the first step."""
    recent: tuple[tuple[int, int], ...] = ()
    """(step_no, position) of the newest steps: a repeated one must say the same position. Nothing else of it is looked
    at: it is answered from what was kept, and runs nothing."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Trim to `trim_to`, gather `rows`, then run the step."""

    step: Step
    new_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerFromJournal:
    step_no: int


@dataclass(frozen=True, slots=True)
class Refuse:
    step_no: int
    error: Refused


@dataclass(frozen=True, slots=True)
class Break:
    """The peer broke the protocol: end its stream, and the session with it."""

    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Ignore:
    """Data of a route that is no longer in use, or a replay of what is held."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Data of a route whose `Open` has not come yet: leave it, and what follows it, unread until then."""


Action = Compute | AnswerFromJournal | Refuse | Break | Ignore | Wait


def on_reopen(state: SessionState, ask: Open) -> SessionState:
    """The session on its new route. Raises OutOfOrder when that is not newer than the present one."""
    if ask.route_version <= state.route_version:
        raise OutOfOrder(
            f"the session is on route version {state.route_version}; a new one must be higher than that",
            value=str(ask.route_version), bound=str(state.route_version),
        )  # fmt: skip
    moved = replace(state, route_version=ask.route_version, upstream=ask.upstream)
    if ask.is_fresh:
        moved = replace(moved, last_step_no=-1, position=0, rows=0, recent=())
    return moved


def on_step(state: SessionState, step: Step) -> tuple[SessionState, Action]:
    """Exactly once: compute the next step, answer a repeated one from the journal, refuse a gap."""
    if step.route_version < state.route_version:
        return state, Ignore()
    if step.route_version > state.route_version:
        return state, Wait()
    if step.replay:
        return _on_replay(state, step)
    is_first = state.last_step_no < 0 and step.position == 0  # after a trim to nothing: there is no history to lack
    if step.step_no > state.last_step_no + 1 and not is_first:
        return state, _refuse(step, OutOfOrder(
            f"step {step.step_no} came after step {state.last_step_no}",
            value=str(step.step_no), bound=str(state.last_step_no + 1),
        ))  # fmt: skip
    if step.step_no <= state.last_step_no:
        return state, _repeat(state, step)
    return _advance(state, step)


def _on_replay(state: SessionState, step: Step) -> tuple[SessionState, Action]:
    """A replay fills up what is missing, in order of position; its numbers may jump, since it is the sum of many steps.

    The last positions of a replay are single steps as they were, with trims and gathers of their own.
    """
    is_next = step.step_no > state.last_step_no
    goes_on = step.step_no == state.last_step_no and step.position == state.position and step.trim_to is None
    return _advance(state, step) if is_next or goes_on else (state, Ignore())


def _repeat(state: SessionState, step: Step) -> Action:
    position = dict(state.recent).get(step.step_no)
    if position is None:
        return _refuse(step, JournalGap(
            f"the answer to step {step.step_no} is no longer kept",
            value=str(step.step_no), bound=str(state.last_step_no),
        ))  # fmt: skip
    if position != step.position:
        return Break(RemoteProtocolError(
            f"step {step.step_no} came twice: at position {step.position}, before at {position}"
        ))  # fmt: skip
    return AnswerFromJournal(step.step_no)


def _advance(state: SessionState, step: Step) -> tuple[SessionState, Action]:
    try:
        batch, new_tokens = _shape_of(state, step)
        held = _position_after_trim(state, step)
        _check_rows(state, step, batch)
        _check_pieces(state, held, new_tokens)
        if held + new_tokens > state.max_tokens:
            raise Unsupported(
                f"the step ends at position {held + new_tokens}, the session was opened for {state.max_tokens}",
                value=str(held + new_tokens), bound=str(state.max_tokens),
            )  # fmt: skip
    except Refused as refused:
        return state, _refuse(step, refused)
    moved = replace(
        state,
        last_step_no=step.step_no,
        recent=(*state.recent, (step.step_no, step.position))[-MAX_RECENT:],
        position=held + new_tokens,
        rows=batch,
    )
    return moved, Compute(step, new_tokens)


def _shape_of(state: SessionState, step: Step) -> tuple[int, int]:
    """(rows, new tokens) of the step, once its tensors agree with each other and with the model."""
    shape = step.hidden.shape
    if len(shape) != 3 or shape[2] != state.hidden_size or 0 in shape:
        raise _wrong("hidden states", shape, f"[rows, tokens, {state.hidden_size}]")
    if step.hidden.dtype == "int64":
        raise Unsupported("hidden states as int64; a span takes numbers with a fraction", value="int64", bound="float")
    batch, new_tokens = shape[0], shape[1]
    if batch * new_tokens > state.max_chunk_tokens:
        raise Unsupported(
            f"{batch} rows × {new_tokens} tokens in one step; this server takes {state.max_chunk_tokens}",
            value=str(batch * new_tokens), bound=str(state.max_chunk_tokens),
        )  # fmt: skip
    for name, ids in (("position ids", step.position_ids), ("token ids", step.token_ids)):
        if ids is not None and (ids.shape != (batch, new_tokens) or ids.dtype != "int64"):
            raise _wrong(name, ids.shape, f"int64 [{batch}, {new_tokens}]")
    if state.needs_token_ids and step.token_ids is None:
        raise Unsupported(
            "this model's blocks need the token ids, and the step has none",
            value="none", bound=f"int64 [{batch}, {new_tokens}]",
        )  # fmt: skip
    if len(step.timings) >= MAX_HOPS:  # with ours there would be more than travel
        raise Unsupported("the step tells of too many hops", value=str(len(step.timings)), bound=str(MAX_HOPS - 1))
    if step.left_padding is not None and len(step.left_padding) != batch:
        raise _wrong("left padding", (len(step.left_padding),), f"[{batch}]")
    return batch, new_tokens


def _position_after_trim(state: SessionState, step: Step) -> int:
    held = state.position
    if step.trim_to is not None and step.trim_to != held:
        if step.trim_to > held:
            raise Unsupported(
                f"cannot trim to {step.trim_to} positions: {held} are held", value=str(step.trim_to), bound=str(held)
            )
        if not state.can_trim:
            raise NeedsReplay(
                f"this model's state cannot be brought back to {step.trim_to} positions: {held} are held",
                value=str(step.trim_to), bound=str(held),
            )  # fmt: skip
        held = step.trim_to
    if step.position != held:
        raise OutOfOrder(
            f"the step starts at position {step.position}, {held} are held", value=str(step.position), bound=str(held)
        )
    return held


def _check_pieces(state: SessionState, held: int, new_tokens: int) -> None:
    """The family's code would drop what it holds, and say nothing."""
    if not state.prefill_in_chunks and held > 0 and new_tokens > 1:
        raise Unsupported(
            f"{new_tokens} positions in one step onto {held}; this model takes several only as the first",
            value=str(new_tokens), bound="1",
        )  # fmt: skip


def _check_rows(state: SessionState, step: Step, batch: int) -> None:
    if batch > state.max_rows:
        raise Unsupported(
            f"{batch} rows; the session was opened for {state.max_rows}", value=str(batch), bound=str(state.max_rows)
        )
    if step.rows is None:
        if state.rows not in (0, batch):
            raise _wrong("hidden states", (batch,), f"[{state.rows}, …]: the rows that the cache has")
        return
    if len(step.rows) != batch:
        raise _wrong("row gather", (len(step.rows),), f"[{batch}]")
    if any(row >= max(state.rows, 1) for row in step.rows):
        raise Unsupported(
            f"the row gather names row {max(step.rows)}; the cache has {state.rows}",
            value=str(max(step.rows)), bound=str(state.rows),
        )  # fmt: skip


def _wrong(what: str, shape: tuple[int, ...], wanted: str) -> Unsupported:
    return Unsupported(
        f"{what} of shape {list(shape)}; wanted {wanted}", value=str(list(shape))[:64], bound=wanted[:64]
    )


def _refuse(step: Step, error: Refused) -> Refuse:
    return Refuse(step.step_no, error)
