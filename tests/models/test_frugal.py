"""What a client does not need is not imported; who needs it later finds it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from corolla.models.frugal import give_back_freed, give_back_library_pages

LATER = """
import sys
from corolla.models.frugal import import_modeling
import_modeling()
import corolla.client.model
assert "scipy.optimize" not in sys.modules, "scipy came along"
import numpy, transformers.utils
from transformers.loss import loss_for_object_detection as losses
assert losses.is_scipy_available is transformers.utils.is_scipy_available
assert transformers.utils.is_scipy_available()
rows, columns = losses.linear_sum_assignment(numpy.array([[1.0, 0.0], [0.0, 1.0]]))
assert list(columns) == [1, 0], columns
"""


@pytest.mark.slow
def test_scipy_is_imported_by_what_needs_it_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator is what keeps it")
def test_freed_memory_below_what_is_in_use_goes_back_to_the_system() -> None:
    pieces = [bytes(1000) for _ in range(100_000)]
    in_use = pieces[::1000]  # between the others, so that the allocator keeps what is freed around them
    del pieces
    freed_from = psutil.Process().memory_info().rss
    give_back_freed()
    given_back = freed_from - psutil.Process().memory_info().rss
    assert given_back > 50_000_000, f"{given_back} of 100,000,000 bytes were given back"
    assert all(piece == bytes(1000) for piece in in_use)


def resident_kb_of(library: str) -> int:
    """Kilobytes of a library's code in this process's memory."""
    is_it, resident_kb = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0].isdigit() or line[0] in "abcdef":
            is_it = library in line and " r-xp " in line
        elif is_it and line.startswith("Rss:"):
            resident_kb += int(line.split()[1])
    return resident_kb


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_code_that_only_the_import_touched_leaves_memory_and_what_is_called_comes_back() -> None:
    numbers = torch.linspace(0, 1, 4096).reshape(64, 64)
    expected = numbers @ numbers
    before = resident_kb_of("libtorch_cpu")
    give_back_library_pages()
    after = resident_kb_of("libtorch_cpu")
    assert after < before / 2, f"{before} kB of torch's code were in memory, {after} kB still are"
    assert torch.equal(numbers @ numbers, expected)
