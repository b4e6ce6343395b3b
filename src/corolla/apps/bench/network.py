"""A slow network on this machine (`tools/wanlab.py`), for benchmarks and tests that need delay and unplugged cables.

Its program stands in the repository, not in the package: it wants root and rearranges the machine's network.
"""

import os
import select
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from corolla.errors import SwarmError

PROGRAM: Final = Path(__file__).resolve().parents[4] / "tools" / "wanlab.py"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
MAX_HOSTS = 32


class NoSlowNetwork(SwarmError):
    """This machine cannot make one; the message says what is missing."""


class SlowNetwork:
    """Hosts numbered from 0, which programs enter with `within`."""

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        self._process = process
        self._prefix = prefix

    def within(self, host: int) -> tuple[str, ...]:
        """Words before a command that run it on that host."""
        return ("ip", "netns", "exec", f"{self._prefix}{host}")

    def address(self, host: int) -> str:
        return f"10.99.0.{host + 1}"

    def cut(self, host: int, other: int | None = None) -> None:
        """Unplug it, or its way to the other: packets vanish without a word to anybody."""
        self._command(f"cut {_way(host, other)}")

    def heal(self, host: int, other: int | None = None) -> None:
        self._command(f"heal {_way(host, other)}")

    def _command(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def _way(host: int, other: int | None) -> str:
    return str(host) if other is None else f"{host}-{other}"


@contextmanager
def slow_network(hosts: int, *, rtt_ms: float, mbit: float = 0.0) -> Generator[SlowNetwork]:
    """Hosts with this round trip between any two and this bandwidth out of each. Raises NoSlowNetwork."""
    assert 1 <= hosts <= MAX_HOSTS
    if not PROGRAM.is_file():
        raise NoSlowNetwork(f"the slow network needs {PROGRAM.name} from corolla's repository")
    prefix = f"c{os.getpid()}-"
    words = ["--hosts", str(hosts), "--rtt-ms", str(rtt_ms), "--mbit", str(mbit), "--prefix", prefix]
    with subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, str(PROGRAM), *words, "--exit-with-parent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _wait_ready(process)
            yield SlowNetwork(process, prefix)
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    descriptor = process.stdout.fileno()
    if not select.select([descriptor], [], [], START_TIMEOUT_S)[0]:
        raise NoSlowNetwork(f"the slow network was not up after {START_TIMEOUT_S:g} s")
    if os.read(descriptor, 64) != b"ready\n":
        said = process.stderr.read(4096).decode(errors="replace").strip().splitlines()
        raise NoSlowNetwork(said[-1] if said else "the slow network ended without a word")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely, since it has namespaces to take down."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
