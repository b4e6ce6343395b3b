"""What the session layer asks of whatever computes: the seam between protocol and tensors. No torch here.

`server/span.py` implements it over real blocks; tests without torch put a toy in its place.
"""

from dataclasses import dataclass
from typing import Protocol

from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """What a span is and can, as the handler and the announcement need it."""

    start: int
    end: int
    hidden_size: int
    dtype: DType
    needs_token_ids: bool = False
    can_trim: bool = True
    prefill_in_chunks: bool = True
    """False: a prompt must come in one step, then single positions; this family's state is not exact in chunks."""


class SessionCache(Protocol):
    """The keys, values and states of one session; dropped by letting go of it."""

    @property
    def num_tokens(self) -> int: ...


class SpanRunner(Protocol):
    """Runs steps through blocks. Called from the device thread only."""

    @property
    def facts(self) -> SpanFacts: ...

    def new_cache(self, start: int, end: int, max_tokens: int) -> SessionCache:
        """An empty cache for blocks `[start, end)` of the span, for up to `max_tokens` positions a row."""
        ...

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        """Trim, gather, compute; the wanted positions of the result (None: none are wanted)."""
        ...
