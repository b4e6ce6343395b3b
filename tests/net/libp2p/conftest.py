"""What the tests of real daemons share."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory with a short path: those of unix sockets are bounded."""
    with tempfile.TemporaryDirectory(prefix="cor-") as directory:
        yield Path(directory)


@pytest.fixture
def black_hole() -> Iterator[Callable[[int], int]]:
    """Makes a port of 127.0.0.2 that neither takes a connection nor refuses one: its queue is full. 0: a free one."""
    with ExitStack() as stack:

        def make(port: int) -> int:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.2", port))
            listener.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            return listener.getsockname()[1]

        yield make


@pytest.fixture
def python(short_dir: Path) -> Iterator[Script]:
    """Runs a program in a process of its own, which is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str) -> "subprocess.Popen[str]":
        script = short_dir / f"program{len(started)}.py"
        script.write_text(program)
        started.append(
            subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def is_running(pid: int) -> bool:
    """A zombie has ended: it only waits for its parent to look."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def wait_gone() -> Callable[[int, float], float]:
    """Seconds until the process was gone; fails when it is not in time."""

    def wait(pid: int, within_s: float) -> float:
        started_at = time.monotonic()
        while is_running(pid):
            assert time.monotonic() - started_at < within_s, f"process {pid} still runs after {within_s} s"
            time.sleep(0.02)
        return time.monotonic() - started_at

    return wait
