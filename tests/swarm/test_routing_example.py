"""The example that shows how a route is chosen prints what the documentation says."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "routing.py"


def test_the_example_prints_the_four_cases() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=250, check=True)
    assert ran.stdout.splitlines() == [
        "A's cache is full: B 0:4 at 0.218 s",
        "A has room: A 0:4 at 0.038 s",
        "two halves: A 0:2, B 2:4 at 0.076 s",
        "six blocks over two halves of four: MissingBlocks([4, 5])",
    ]
