"""A span without tensors: its output depends on every input that came before, so no mistake goes unseen.

A position's hidden state is one number of 62 bits (two float32 on the wire, read as floats only to see that they are
finite). Block i turns it into a hash of i and of all numbers that the row has brought to it so far. A step that is
lost, repeated, reordered, given to the wrong row or run by the wrong block changes everything after it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

HIDDEN_SIZE = 2
_MASK = 0xBFFFFFFF_BFFFFFFF
"""The highest bit of each float's exponent stays clear: nothing that is sent may look like NaN or infinity."""
_FACTOR = 6364136223846793005  # Knuth's MMIX generator


@dataclass(slots=True)
class ToyCache:
    """For each row, the states after each position: `rows[r][p][b]`. The whole history, so that any trim is exact."""

    start: int
    end: int
    rows: list[list[list[int]]] = field(default_factory=list[list[list[int]]])

    @property
    def num_tokens(self) -> int:
        return len(self.rows[0]) if self.rows else 0


class ToySpan:
    """`SpanRunner` over hashes. What it says it cannot, it must never be asked for."""

    def __init__(self, start: int, end: int, *, can_trim: bool = True, prefill_in_chunks: bool = True) -> None:
        self.facts = SpanFacts(
            start, end, HIDDEN_SIZE, "float32", can_trim=can_trim, prefill_in_chunks=prefill_in_chunks
        )

    def new_cache(self, start: int, end: int, max_tokens: int) -> ToyCache:
        return ToyCache(start, end)

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        assert isinstance(cache, ToyCache)
        held, facts = cache.num_tokens, self.facts
        assert facts.can_trim or step.trim_to in (None, held), "trimmed, and cannot be"
        assert facts.prefill_in_chunks or held == 0 or step.hidden.shape[1] == 1, "a prompt in pieces"
        if step.trim_to is not None:
            cache.rows = [row[: step.trim_to] for row in cache.rows]
        if step.rows is not None:
            cache.rows = [list(cache.rows[index]) for index in step.rows]
        batch, new_tokens, _ = step.hidden.shape
        cache.rows = cache.rows or [[] for _ in range(batch)]
        numbers = numbers_of(step.hidden)
        outputs = [
            [_through(cache, row, number) for number in numbers[row * new_tokens : (row + 1) * new_tokens]]
            for row in range(batch)
        ]
        if want == "none":
            return None
        return hidden_of([row[-1:] for row in outputs] if want == "last" else outputs)


def _through(cache: ToyCache, row: int, number: int) -> int:
    """One position of one row through the blocks; remembers their states."""
    history = cache.rows[row]
    before = history[-1] if history else [0] * (cache.end - cache.start)
    states: list[int] = []
    for block, state in zip(range(cache.start, cache.end), before, strict=True):
        number = ((state + number) * _FACTOR + block + 1) & _MASK
        states.append(number)
    history.append(states)
    return number


def hidden_of(rows: Sequence[Sequence[int]]) -> WireTensor:
    """`rows` [batch][tokens] of numbers as hidden states [batch, tokens, 2]."""
    flat = [number & _MASK for row in rows for number in row]
    return WireTensor("float32", (len(rows), len(rows[0]), HIDDEN_SIZE), struct.pack(f"<{len(flat)}Q", *flat))


def numbers_of(hidden: WireTensor) -> list[int]:
    """The numbers of hidden states [batch, tokens, 2], row after row."""
    return list(struct.unpack(f"<{hidden.shape[0] * hidden.shape[1]}Q", hidden.data))


def whole_model(num_blocks: int, inputs: Sequence[int]) -> list[int]:
    """What a swarm must give for one row: all inputs through all blocks in one place."""
    cache = ToyCache(0, num_blocks, [[]])
    return [_through(cache, 0, number & _MASK) for number in inputs]
