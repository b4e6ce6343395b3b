"""Try every family on the newest transformers, and print what comes out otherwise than the table says.

    python tools/latest.py [--transformers VERSION]

A fresh virtual environment gets the torch that is installed here and the newest transformers (or VERSION), whatever
pyproject.toml allows; `corolla.models.survey` runs in it, from this source tree. Exit code 1 when a family that the
table in `docs/families.md` calls right is not right any more.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from corolla.models.survey import Row, rows_of_table, what_changed
from fresh import make_environment, say

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
SURVEY_TIMEOUT_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", metavar="VERSION", help="this one instead of the newest")
    wanted = parser.parse_args().transformers
    directory = Path(tempfile.mkdtemp(prefix="corolla-latest-"))
    try:
        torch = f"torch=={version('torch').partition('+')[0]}"
        newest = f"transformers=={wanted}" if wanted else "transformers"
        say(f"installing {newest} into a fresh environment")
        python = make_environment(directory, torch, newest, "accelerate", "safetensors", "numpy", "msgspec")
        tried = ask(python, "import transformers; print(transformers.__version__)")
        say(f"trying every family on transformers {tried}, torch {version('torch')}")
        return compare(rows_of_table(PAGE.read_text()), survey(python))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def compare(before: dict[str, Row], rows: Iterator[Row]) -> int:
    """The report of all that could be tried in time; a survey that was not finished fails."""
    after: dict[str, Row] = {}
    try:
        for row in rows:
            after[row.family] = row
    except TimeoutError as error:
        say(f"{error}; of those {len(after)} families:")
        report({name: row for name, row in before.items() if name in after}, after)
        return 1
    return report(before, after)


def survey(python: Path) -> Iterator[Row]:
    """Each family's row, as it comes. Raises TimeoutError when it takes too long."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "corolla.models.survey"]
    deadline = time.monotonic() + SURVEY_TIMEOUT_S
    with subprocess.Popen(  # noqa: S603 - our own words, no shell
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout, 1):
            row = Row(**json.loads(line))
            sys.stderr.write(f"\r{number} {row.family:<30}")
            yield row
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"stopped at {row.family}: the survey took more than {SURVEY_TIMEOUT_S} s")
    sys.stderr.write("\r" + " " * 40 + "\r")
    if process.returncode:
        raise SystemExit(f"the survey ended with code {process.returncode}")


def report(before: dict[str, Row], after: dict[str, Row]) -> int:
    """Print what changed; 1 when something that was right is not."""
    changes = what_changed(before, after)
    right = sum(row.outcome == "right" for row in after.values())
    say(f"{right} of {len(after)} families are right; {len(changes)} came out otherwise than {PAGE.name} says")
    for line in changes:
        say(f"  {line}")
    return int(any(row.outcome == "right" and after.get(name, row).outcome != "right" for name, row in before.items()))


def ask(python: Path, code: str) -> str:
    return subprocess.check_output([str(python), "-c", code], text=True, timeout=300).strip()  # noqa: S603 - ours


if __name__ == "__main__":
    sys.exit(main())
