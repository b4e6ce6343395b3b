"""NaN and infinity are found wherever they are, in every dtype that travels; everything else passes."""

import math

import pytest
import torch

from corolla.models.finite import is_finite
from corolla.models.tensors import to_wire
from corolla.wire.tensors import WireTensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN_BITS = {torch.float32: (0x7F800001, -1), torch.bfloat16: (0x7F81, -1), torch.float16: (0x7C01, -1)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("tokens", [4, 4096], ids=["few bytes", "many bytes"])
@pytest.mark.parametrize("at", [0, 17, 63])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float, at: int, tokens: int) -> None:
    hidden = torch.randn(1, tokens, 16, dtype=torch.float32).to(dtype)
    assert is_finite(to_wire(hidden))
    hidden.view(-1)[at * tokens // 4] = bad
    assert not is_finite(to_wire(hidden))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_nan_is_found_and_the_largest_numbers_pass(dtype: torch.dtype) -> None:
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    for bits in NAN_BITS[dtype]:
        assert not is_finite(to_wire(torch.tensor([1, bits], dtype=integer).view(dtype)))
    limits = torch.finfo(dtype)
    large = limits.max / 2
    for row in (
        [large, -large],
        [limits.max, limits.min],
        [limits.max],
        [limits.min],
        [-1.0, -limits.tiny],
        [0.0, -0.0],
    ):
        assert is_finite(to_wire(torch.tensor(row, dtype=dtype)))
        assert is_finite(to_wire(torch.tensor(row * 20_000, dtype=dtype)))


def test_token_ids_and_nothing_at_all_are_finite() -> None:
    assert is_finite(WireTensor("int64", (1, 1), b"\xff" * 8))
    assert is_finite(WireTensor("bfloat16", (1, 0, 16), b""))


def test_what_arrives_need_not_lie_at_an_even_address() -> None:
    data = memoryview(b"\0" + to_wire(torch.tensor([1.0, math.inf], dtype=torch.float32)).data)[1:]
    assert not is_finite(WireTensor("float32", (2,), data))
