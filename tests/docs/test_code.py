"""The Python on the front page and in the reference runs as it stands, against a swarm of a tiny model."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corolla.apps.processes import Processes
from corolla.models.testing import write_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Path:
    directory = write_tiny(tmp_path_factory.mktemp("model"), "llama")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with Processes(ONE_THREAD) as processes:
        yield processes.start("the server", "serve", str(model)).wait_ready(time.monotonic() + 90).addr


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_the_code_of_a_page_runs_in_order(page: str, model: Path, address: str) -> None:
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    code = "\n".join(textwrap.dedent(block) for _, block in blocks)
    assert "from corolla import" in code
    code = code.replace('"MODEL"', repr(str(model))).replace('"ADDRESS"', repr(address))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
