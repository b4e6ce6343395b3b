"""One generation over a route of servers, as the client counts it: position, step number, hops.

State moves only after success. A step that failed half-way has moved the first servers but not this count, and
sending it again under the same number is harmless: they answer it from what they kept (`server/session.py`).
In this version activations pass through the client between two servers (a star).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from corolla.client.hop import Hop
from corolla.errors import BadInput, HopFailed, Overloaded, SwarmError
from corolla.ids import PeerId, short
from corolla.wire.messages import HopTiming, Output, Step, Want
from corolla.wire.tensors import WireTensor

log = logging.getLogger(__name__)

OVERLOAD_PAUSES_S = (0.1, 0.5, 2.0)
"""Waits before a step is repeated on a server whose line was full; after the last one the error is raised."""


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One server of the route in use and the blocks `[start, end)` it runs."""

    peer_id: PeerId
    start: int
    end: int


class Session:
    """Steps through all blocks of the model; `client/swarm.py` opens and closes it."""

    def __init__(self, hops: Sequence[Hop], *, max_tokens: int, max_rows: int) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.position = 0
        self.rows = 0
        """Sequences held; 0 before the first step."""
        self.timings: list[HopTiming] = []
        """Of the last step, one for each hop in order."""
        self._hops = list(hops)
        self._step_no = 0
        self._trim_to: int | None = None
        self._rows: list[int] | None = None
        self._lock = asyncio.Lock()

    @property
    def route(self) -> list[RouteHop]:
        return [RouteHop(hop.peer, hop.start, hop.end_block) for hop in self._hops]

    @property
    def max_chunk_tokens(self) -> int:
        """Most positions × rows that every server of the route takes in one step."""
        return min(hop.opened.max_chunk_tokens for hop in self._hops)

    @property
    def max_chunk_bytes(self) -> int:
        return min(hop.opened.window_bytes for hop in self._hops)

    @property
    def prefill_in_chunks(self) -> bool:
        return all(hop.opened.prefill_in_chunks for hop in self._hops)

    @property
    def needs_token_ids(self) -> bool:
        return any(hop.opened.needs_token_ids for hop in self._hops)

    def trim(self, num_tokens: int) -> None:
        """Forget all positions from `num_tokens` on. Costs nothing: it rides on the next step."""
        if not 0 <= num_tokens <= self.position:
            raise BadInput(f"cannot trim to {num_tokens} tokens: the session holds {self.position}")
        if self._trim_to is not None or num_tokens < self.position:
            self._trim_to = num_tokens
            self.position = num_tokens

    def gather(self, rows: Sequence[int]) -> None:
        """Before the next step, row i of every cache becomes the present row `rows[i]`."""
        self._rows = list(rows) if self._rows is None else [self._rows[row] for row in rows]

    async def step(
        self,
        hidden: WireTensor,
        *,
        num_tokens: int,
        want: Want,
        position_ids: WireTensor | None = None,
        left_padding: list[int] | None = None,
        token_ids: WireTensor | None = None,
    ) -> WireTensor | None:
        """Run `hidden` [rows, num_tokens, hidden_size] through all blocks; the wanted positions come back.

        Raises HopFailed, Refused or RemoteProtocolError; `position` then is what it was.
        """
        if self.position + num_tokens > self.max_tokens:
            raise BadInput(
                f"the session was opened for {self.max_tokens} tokens; {self.position} are held, "
                f"{num_tokens} more do not fit"
            )
        async with self._lock:
            step = Step(
                step_no=self._step_no,
                position=self.position,
                trim_to=self._trim_to,
                rows=self._rows,
                left_padding=left_padding,
                want="all",
                hidden=hidden,
                position_ids=position_ids,
                token_ids=token_ids,
            )
            output = await self._through_the_hops(step, num_tokens, want)
            self._step_no += 1
            self.position += num_tokens
            self.rows = hidden.shape[-3]
            self._trim_to = self._rows = None
            return output

    async def _through_the_hops(self, step: Step, num_tokens: int, want: Want) -> WireTensor | None:
        last = self._hops[-1]
        timings: list[HopTiming] = []
        hidden: WireTensor | None = step.hidden
        for hop in self._hops:
            assert hidden is not None
            step = _with(step, hidden=hidden, want=want if hop is last else "all")
            output = await _patiently(hop, step)
            hidden = _checked(hop, step, output, num_tokens)
            timings += output.timings
        self.timings = timings
        return hidden

    def close(self) -> None:
        """Give the session's place on every server back."""
        for hop in self._hops:
            hop.close()


def _with(step: Step, *, hidden: WireTensor, want: Want) -> Step:
    return Step(
        step_no=step.step_no,
        route_version=step.route_version,
        position=step.position,
        trim_to=step.trim_to,
        rows=step.rows,
        left_padding=step.left_padding,
        want=want,
        hidden=hidden,
        position_ids=step.position_ids,
        token_ids=step.token_ids,
    )


async def _patiently(hop: Hop, step: Step) -> Output:
    """A full line is no failure: repeat the step a few times before saying so."""
    for pause_s in OVERLOAD_PAUSES_S:
        try:
            return await hop.step(step)
        except Overloaded as full:
            log.info("server overloaded, waiting", extra={"peer": short(hop.peer), "bound": full.bound})
            await asyncio.sleep(pause_s)
    return await hop.step(step)


def _checked(hop: Hop, step: Step, output: Output, num_tokens: int) -> WireTensor | None:
    """The output's hidden states, if they are what was asked for: everything else is that server's fault."""
    want = step.want
    hidden = output.hidden
    if output.position != step.position + num_tokens:
        raise _at_fault(
            hop, f"it holds {output.position} positions after step {step.step_no}, not {step.position + num_tokens}"
        )
    if want == "none":
        return None
    if hidden is None:
        raise _at_fault(hop, f"its output of step {step.step_no} has no hidden states")
    shape = list(step.hidden.shape)
    if want == "last":
        shape[-2] = 1
    if list(hidden.shape) != shape or hidden.dtype != step.hidden.dtype:
        raise _at_fault(hop, f"its output is {hidden.dtype} {list(hidden.shape)}, not {step.hidden.dtype} {shape}")
    return hidden


def _at_fault(hop: Hop, reason: str) -> SwarmError:
    hop.end(HopFailed(hop.peer, reason))
    return HopFailed(hop.peer, reason)
