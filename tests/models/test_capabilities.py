"""The short run at load sees through a family that looks ahead, is not exact in chunks, or cannot go back."""

import dataclasses

import pytest
import torch

from corolla.errors import BadInput
from corolla.models.capabilities import find_capabilities
from corolla.models.dataflow import Dataflow, plain_chain
from corolla.models.family import Structure

STRUCTURE = Structure(
    family="made-up",
    takes_position_ids=True,
    cache_argument="past_key_values",
    embedding_size=4,
    stream_shape=("batch", "tokens", 4),
    stream_dtype=torch.float32,
)

DATAFLOW = plain_chain(4)


class RunningSum:
    """A cache of 16 bytes for each position and 100 for each row."""

    def __init__(self, *, trims: bool) -> None:
        self.seen, self.trims = [], trims

    @property
    def used_bytes(self):
        return 100 + 16 * len(self.seen)

    def can_trim(self, num_tokens):
        return self.trims and num_tokens <= len(self.seen)

    def trim(self, num_tokens):
        del self.seen[num_tokens:]


@dataclasses.dataclass
class MadeUpSpan:
    """Each position becomes the mean of those before it: as simple as something with a memory can be."""

    trims: bool = True
    looks_ahead: bool = False
    forgets_between_chunks: bool = False
    output_scale: float = 1.0
    structure: Structure = STRUCTURE
    dataflow: Dataflow = DATAFLOW
    dtype: torch.dtype = torch.float32

    def new_cache(self, rows):
        assert rows == 1
        return RunningSum(trims=self.trims)

    def forward(self, hidden, cache, *, token_ids=None):
        memory = [] if self.forgets_between_chunks else list(cache.seen)
        new = list(hidden.unbind(1))
        cache.seen.extend(new)
        outputs = []
        for index in range(len(new)):
            visible = memory + (new if self.looks_ahead else new[: index + 1])
            outputs.append(torch.stack(visible).mean(0) * self.output_scale)
        return torch.stack(outputs, 1)


def test_a_sound_family_can_all():
    found = find_capabilities(MadeUpSpan())
    assert (found.can_trim, found.prefill_in_chunks) == (True, True)
    assert (found.cache_bytes_per_token, found.cache_bytes_per_row) == (16, 100)


def test_a_family_that_is_not_exact_in_chunks_is_seen():
    assert not find_capabilities(MadeUpSpan(forgets_between_chunks=True)).prefill_in_chunks


def test_a_state_that_cannot_be_brought_back_is_seen():
    assert not find_capabilities(MadeUpSpan(trims=False)).can_trim


def test_a_trim_that_leaves_something_behind_is_seen():
    class Forgetful(RunningSum):
        def trim(self, num_tokens):
            del self.seen[num_tokens + 1 :]

    class Span(MadeUpSpan):
        def new_cache(self, rows):
            return Forgetful(trims=True)

    assert not find_capabilities(Span()).can_trim


def test_a_family_that_looks_ahead_is_no_decoder():
    with pytest.raises(BadInput, match="made-up: later positions change earlier ones"):
        find_capabilities(MadeUpSpan(looks_ahead=True))


def test_code_that_fails_in_a_span_is_named_with_what_it_says_and_where_to_read_on():
    class Span(MadeUpSpan):
        def forward(self, hidden, cache, *, token_ids=None):
            raise IndexError("list index out of range")

    with pytest.raises(BadInput, match=r"made-up: .* \(IndexError: list index out of range\): .*docs/families.md"):
        find_capabilities(Span())


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(scale):
    with pytest.raises(BadInput, match="made-up: the blocks give NaN or infinity"):
        find_capabilities(MadeUpSpan(output_scale=scale))
