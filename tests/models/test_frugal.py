"""What a client does not need is not imported; who needs it later finds it."""

import subprocess
import sys

import pytest

from corolla.models.frugal import give_back_freed

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
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def test_giving_back_memory_works_on_every_system() -> None:
    give_back_freed()
