"""Steps through real blocks: from a `Step`'s bytes to an `Output`'s bytes, on the device thread."""

from typing import cast

import torch

from corolla.models.cache import SpanCache
from corolla.models.span import Span
from corolla.models.tensors import from_wire, to_wire
from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor


class TorchSpanRunner:
    """`SpanRunner` over a loaded span."""

    def __init__(self, span: Span) -> None:
        self.span = span
        capabilities = span.capabilities
        self.facts = SpanFacts(
            start=span.start,
            end=span.end,
            hidden_size=span.hidden_size,
            dtype=cast(DType, str(span.dtype).removeprefix("torch.")),
            needs_token_ids=capabilities.needs_token_ids,
            can_trim=capabilities.can_trim,
            prefill_in_chunks=capabilities.prefill_in_chunks,
        )

    def new_cache(self, start: int, end: int, max_tokens: int) -> SpanCache:
        return self.span.new_cache(start, end)

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        assert isinstance(cache, SpanCache)
        if step.trim_to is not None:
            cache.trim(step.trim_to)
        if step.rows is not None:
            cache.gather(step.rows)
        hidden = self.span.forward(
            from_wire(step.hidden, self.span.device),
            cache,
            position_ids=None if step.position_ids is None else from_wire(step.position_ids, self.span.device),
            left_padding=step.left_padding,
            token_ids=None if step.token_ids is None else from_wire(step.token_ids, self.span.device),
        )
        if want == "none":
            return None
        if want == "last":
            hidden = hidden[..., -1:, :]
        return to_wire(hidden.to(getattr(torch, wire_dtype)))
