"""The examples run as they stand, and what they print is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name: str, tmp_path: Path) -> str:
    """What the example prints, started from anywhere."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_equals_the_local_model_greedy_and_sampled(tmp_path: Path) -> None:
    out = output_of("generate.py", tmp_path)
    assert out.count("equal to the local model's: True") == 2
    held, whole = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", out.splitlines()[0]))
    assert held < whole / 4


def test_a_conversation_goes_on_where_it_was_and_can_go_back(tmp_path: Path) -> None:
    lines = output_of("conversation.py", tmp_path).splitlines()
    assert [line.split(" on ")[0] for line in lines if " on " in line] == ["blocks 0:3", "blocks 3:6"]
    held = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("tokens held")]
    assert held == [9, 17]
    said = [line.partition(": ")[2] for line in lines if "second turn" in line]
    assert said[0] == said[1]


def test_the_asyncio_session_equals_the_local_model(tmp_path: Path) -> None:
    assert "equal to the local model's: True" in output_of("asyncio_session.py", tmp_path)
