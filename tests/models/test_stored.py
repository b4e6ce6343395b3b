"""A mapped tensor is the one that is read, costs memory only where it is touched, and never writes to its file."""

import psutil
import pytest
import torch

from corolla.errors import BadInput
from corolla.models.checkpoint import TensorInfo
from corolla.models.stored import map_tensor, read_tensor


@pytest.fixture
def info(tmp_path):
    """A bfloat16 matrix somewhere in a file, aligned as safetensors aligns: by its element, not by a page."""
    file = tmp_path / "weights"
    content = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    file.write_bytes(bytes(9_998) + content.view(torch.uint8).numpy().tobytes() + b"after")
    return TensorInfo(file, "BF16", (300, 70), 9_998, 9_998 + content.nbytes)


def test_mapped_and_read_are_equal_and_aligned_alike(info):
    mapped, read = map_tensor(info), read_tensor(info)
    assert torch.equal(mapped, read)
    assert (mapped.dtype, mapped.shape) == (torch.bfloat16, (300, 70))
    assert mapped.data_ptr() % 64 == read.data_ptr() % 64 == info.start % 64


def test_changing_a_mapped_tensor_leaves_the_file_alone(info):
    before = info.file.read_bytes()
    map_tensor(info).fill_(7)
    assert info.file.read_bytes() == before
    assert not (map_tensor(info) == 7).all()


def test_a_mapped_tensor_outlives_its_file(info):
    expected, mapped = read_tensor(info), map_tensor(info)
    info.file.unlink()
    assert torch.equal(mapped, expected)


def test_a_mapped_tensor_takes_memory_as_it_is_touched(tmp_path):
    file, num_rows = tmp_path / "large", 100_000
    with file.open("wb") as stream:
        stream.truncate(num_rows * 1000)
    process = psutil.Process()
    before = process.memory_info().rss
    mapped = map_tensor(TensorInfo(file, "U8", (num_rows, 1000), 0, num_rows * 1000))
    assert mapped[::10_000].sum() == 0
    assert process.memory_info().rss - before < 10_000_000


@pytest.mark.parametrize("get", [map_tensor, read_tensor])
def test_a_file_that_was_cut_or_removed_is_named(get, info):
    with info.file.open("r+b") as stream:
        stream.truncate(20_000)
    with pytest.raises(BadInput, match=r"ends before byte .*; it was truncated after it was opened"):
        get(info)
    info.file.unlink()
    with pytest.raises(BadInput, match=f"{info.file}: cannot be read: No such file"):
        get(info)


def test_what_cannot_be_mapped_is_read(tmp_path):
    file = tmp_path / "odd"
    file.write_bytes(b"x" + torch.arange(4, dtype=torch.int32).view(torch.uint8).numpy().tobytes())
    assert map_tensor(TensorInfo(file, "I32", (4,), 1, 17)).tolist() == [0, 1, 2, 3]
    assert map_tensor(TensorInfo(file, "F32", (0, 4), 1, 1)).shape == (0, 4)
