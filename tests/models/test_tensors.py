"""Tensors cross the wire unchanged, without a copy and without a word on standard error."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput
from corolla.models.tensors import TORCH_DTYPES, to_torch, to_wire
from corolla.wire.tensors import WireTensor


@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    shape=st.lists(st.integers(0, 4), max_size=5),
    offset=st.integers(0, 9),
)
def test_any_tensor_comes_back_the_same(dtype, shape, offset):
    tensor = (torch.randn(shape) * 100).to(TORCH_DTYPES[dtype])
    wire = to_wire(tensor)
    assert (wire.dtype, wire.shape, wire.nbytes) == (dtype, tuple(shape), len(wire.data))
    received = memoryview(b"x" * offset + bytes(wire.data))[offset:]  # read-only, at any alignment
    back = to_torch(WireTensor(wire.dtype, wire.shape, received))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() % back.element_size() == 0  # kernels may count on it


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_no_byte_is_copied_either_way(dtype):
    tensor = torch.ones(3, 5, dtype=TORCH_DTYPES[dtype])
    wire = to_wire(tensor)
    assert to_torch(wire).data_ptr() == tensor.data_ptr()


def test_a_slice_and_a_tensor_with_gradient_travel_too():
    tensor = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert torch.equal(to_torch(to_wire(tensor[:, 1:3])), tensor[:, 1:3].detach())


def test_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(BadInput, match=r"torch\.float64 does not travel"):
        to_wire(torch.zeros(1, dtype=torch.float64))


@pytest.mark.slow  # a fresh process has to import torch
def test_read_only_messages_draw_no_warning():
    script = (
        "from corolla.models.tensors import to_torch; from corolla.wire.tensors import WireTensor;"
        "print(to_torch(WireTensor('float32', (1,), memoryview(bytes(4)))).item())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert (done.stdout, done.stderr) == ("0.0\n", "")
