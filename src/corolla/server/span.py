"""Steps through real blocks: from a `Step`'s bytes to an `Output`'s bytes, on the device thread."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from corolla.errors import Unsupported
from corolla.models.cache import SpanCache
from corolla.models.span import Span
from corolla.models.tensors import TORCH_DTYPES, to_torch, to_wire
from corolla.models.tensors import wire_dtype as name_of
from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

_ANY_POSITION: Final = 1 << 31
"""For models without a bound: more than any session has."""


@dataclass(slots=True)
class SpanSession:
    """One session's cache; made with the first step, which says how many rows there are."""

    start: int
    end: int
    cache: SpanCache | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.cache is None else self.cache.num_tokens


class TorchSpanRunner:
    """`SpanRunner` over a loaded span."""

    def __init__(self, span: Span) -> None:
        self.span = span
        can = span.capabilities
        self.facts = SpanFacts(
            start=span.start,
            end=span.end,
            hidden_size=span.hidden_size,
            dtype=name_of(span.dtype),
            needs_token_ids=can.needs_token_ids,
            can_trim=can.can_trim,
            prefill_in_chunks=can.prefill_in_chunks,
        )

    def new_cache(self, start: int, end: int, max_tokens: int) -> SpanSession:
        return SpanSession(start, end)

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        assert isinstance(cache, SpanSession)
        if step.token_ids is not None:
            _check_range("token id", step.token_ids, self.span.vocabulary)
        if step.position_ids is not None:
            _check_range("position id", step.position_ids, self.span.max_positions or _ANY_POSITION)
        output = self.span.forward(
            to_torch(step.hidden, self.span.device),
            self._prepared(cache, step),
            position_ids=None if step.position_ids is None else to_torch(step.position_ids, self.span.device),
            left_padding=step.left_padding,
            token_ids=None if step.token_ids is None else to_torch(step.token_ids, self.span.device),
        )
        if want == "none":
            return None
        if want == "last":
            output = output[..., -1:, :]
        return to_wire(output.to(TORCH_DTYPES[wire_dtype]))

    def _prepared(self, session: SpanSession, step: Step) -> SpanCache:
        """The session's cache, trimmed and gathered as the step says."""
        if session.cache is None:
            session.cache = self.span.new_cache(step.hidden.shape[-3], session.start, session.end)
            return session.cache
        if step.trim_to is not None:
            session.cache.trim(step.trim_to)
        if step.rows is not None:
            session.cache.gather(step.rows)
        return session.cache


def _check_range(name: str, given: WireTensor, bound: int) -> None:
    """Raises Unsupported. On a GPU an id outside of a table would end the whole device, with everybody's sessions."""
    ids = np.frombuffer(given.data, "<i8")
    wrong = ids[(ids < 0) | (ids >= bound)]
    if wrong.size:
        raise Unsupported(
            f"{name} {wrong[0]}: this model has them from 0 to {bound - 1}",
            value=str(wrong[0]), bound=str(bound - 1),
        )  # fmt: skip
