"""Fresh virtual environments for the tools that try other versions than the pinned ones, and commands run in them."""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
INSTALL_TIMEOUT_S = 1800


def make_environment(directory: Path, torch: str, *packages: str) -> Path:
    """A fresh environment with these requirements, of which `torch` is one; its python."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The CPU build by itself and first, as the Makefile does: an unpinned torch fetches gigabytes of CUDA.
    if run([*pip, "--no-deps", "--no-index", torch], quiet=True) != 0:
        check([*pip, "--no-deps", torch, *(["--index-url", TORCH_INDEX] if TORCH_INDEX else [])])
    check([*pip, torch, *packages])
    return python


def check(command: Sequence[str]) -> None:
    if run(command) != 0:
        raise SystemExit(f"failed: {' '.join(command)}")


def run(
    command: Sequence[str], *, quiet: bool = False, source: Path | None = None, timeout_s: float = INSTALL_TIMEOUT_S
) -> int:
    """The command's exit code; `source` is a tree of Python code that it shall find."""
    output = subprocess.DEVNULL if quiet else None
    environment = None if source is None else os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return subprocess.run(  # noqa: S603 - our own words, no shell
        command, stdout=output, stderr=output, env=environment, timeout=timeout_s, check=False
    ).returncode


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
