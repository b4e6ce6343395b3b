"""Try corolla on the oldest versions that pyproject.toml allows, so that its ranges stay true.

    python tools/oldest.py [--with NAME==VERSION ...]

A fresh virtual environment gets the lower bound of every dependency, `gguf` and `quant` included, and of what the tests
use; what those pull in comes as pip finds it, which refuses bounds that do not go together. In it, from this source
tree: the public names, two pages of help, and the fast tests. `--with` tries another version of one: is a lower bound
true? Exit code 1 when something fails.
"""

import argparse
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fresh import make_environment, run, say

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("gguf", "quant")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "psutil", "httpx", "openai")
"""Of `dev`. The others check this source tree, as they are pinned, and say nothing about the versions of its users."""
NOT_HERE = (
    "tests/models/test_families.py",  # holds a page to the one version of transformers that it is about
    "tests/apps/gateway/test_browser.py",  # need tools of `dev` that ask for newer libraries than we do
    "tests/apps/gateway/test_schema.py",
    "tests/e2e/test_gateway_pages.py",
)
CHECK_TIMEOUT_S = 3600

_REQUIREMENT = re.compile(r"([\w.-]+)>=([\w.]+)(?:,<[\w.]+)?")
_PUBLIC_NAMES = "import corolla; [getattr(corolla, name) for name in corolla.__all__]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", metavar="NAME==VERSION", action="append", default=[], dest="instead")
    instead = dict(text.split("==", 1) for text in parser.parse_args().instead)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {**lower_bounds(project), **instead}
    directory = Path(tempfile.mkdtemp(prefix="corolla-oldest-"))
    try:
        wanted = [f"{name}=={version}" for name, version in versions.items()]
        say(f"installing into a fresh environment: {' '.join(wanted)}")
        torch = f"torch=={versions['torch']}"
        return try_out(make_environment(directory, torch, *(text for text in wanted if text != torch)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def lower_bounds(project: dict[str, Any]) -> dict[str, str]:
    """The lowest version of each dependency, by name. Raises SystemExit for one that has none."""
    optional: dict[str, list[str]] = project["optional-dependencies"]
    bounds = dict(_bounds([*project["dependencies"], *(text for extra in EXTRAS for text in optional[extra])]))
    tools = dict(_bounds(text for text in optional["dev"] if not text.startswith("corolla[")))
    return bounds | {name: tools[name] for name in TEST_TOOLS}


def _bounds(requirements: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in requirements:
        matched = _REQUIREMENT.fullmatch(text)
        if matched is None:
            raise SystemExit(f"pyproject.toml: {text!r} has no lower bound")
        yield matched[1], matched[2]


def try_out(python: Path) -> int:
    """Run every check, also after one has failed; 1 when one has."""
    failed = [name for name, command in checks(python) if not _passes(name, command)]
    say(f"failed with the oldest versions: {', '.join(failed)}" if failed else "the oldest versions will do")
    return int(bool(failed))


def checks(python: Path) -> Iterable[tuple[str, Sequence[str]]]:
    yield "the public names", (str(python), "-c", _PUBLIC_NAMES)
    for page in (("--help",), ("serve", "--help")):
        yield f"corolla {' '.join(page)}", (str(python), "-m", "corolla", *page)
    left_out = [f"--ignore={ROOT / path}" for path in NOT_HERE]
    marked = ("-m", "not slow and not full", "-p", "no:cacheprovider")
    yield "the fast tests", (str(python), "-m", "pytest", *marked, *left_out, str(ROOT / "tests"))


def _passes(name: str, command: Sequence[str]) -> bool:
    say(f"• {name}")
    return run(command, quiet="--help" in command, source=ROOT / "src", timeout_s=CHECK_TIMEOUT_S) == 0


if __name__ == "__main__":
    sys.exit(main())
