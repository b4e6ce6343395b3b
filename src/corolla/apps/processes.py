"""`corolla` processes that the demo, benchmarks and tests start: known by their `ready` line, gone when we are.

Each child holds our end of a pipe as its standard input and runs with `--exit-with-parent`: when we die, even by
`kill -9`, the system closes the pipe and the child leaves. Each has its own session, so that Ctrl-C in the
terminal reaches us alone and we end them in order.

A child is a family of two: Python and its network daemon. `signal_family` reaches both, as the end of a machine
would; `daemon_pid` names the daemon, for what happens to one of them alone.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from corolla.errors import SwarmError
from corolla.ids import PeerId

STOP_TIMEOUT_S = 10.0
MAX_READY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ready:
    """What a child said when it began to answer."""

    peer: PeerId
    blocks: tuple[int, int] | None
    addr: str


class Child:
    """One process; made by `Processes.start`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    def wait_ready(self, deadline: float) -> Ready:
        """Its ready line. Raises SwarmError, with its last words, when it ends instead or takes too long.

        `deadline`: of `time.monotonic()`.
        """
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SwarmError(f"{self.name} was not ready in time; {self._last_words()}")
            data = os.read(descriptor, MAX_READY_BYTES)
            line += data
            if not data or len(line) > MAX_READY_BYTES:
                raise SwarmError(f"{self.name} ended before it was ready; {self._last_words()}")
        return parse_ready(line)

    @property
    def has_spoken(self) -> bool:
        """Whether `wait_ready` would return, or raise, at once."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    @property
    def daemon_pid(self) -> int:
        """Its network daemon, which runs in a process session of its own."""
        daemons = children_of(self.process.pid)
        if len(daemons) != 1:
            raise SwarmError(f"{self.name} should have one child, its network daemon; it has {len(daemons)}")
        return daemons[0]

    def signal_family(self, which: signal.Signals) -> None:
        """Send a signal to Python and its daemon, at (almost) the same moment."""
        for pid in [*children_of(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, which)

    def kill(self) -> None:
        """End the whole family without a word, as pulling the plug of its machine would."""
        self.signal_family(signal.SIGKILL)
        self.process.wait(timeout=STOP_TIMEOUT_S)

    def freeze(self) -> None:
        """Stop the whole family: it is there, holds its connections and says nothing."""
        self.signal_family(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_family(signal.SIGCONT)

    def _last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return f"it said: {said[-1]}" if said else "it said nothing"


class Processes:
    """Starts children; as a context manager, ends all of them on the way out."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        popen: Callable[..., subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """`popen`: starts them in place of `subprocess.Popen` (`warm.py`)."""
        self._popen = popen or subprocess.Popen
        self._environment = {**os.environ, **(environment or {})}
        self._children: list[Child] = []
        self._logs = tempfile.TemporaryDirectory(prefix="corolla-logs-")

    def start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> Child:
        """Run `corolla ARGUMENTS --json --exit-with-parent`; `within`: words before it that `exec` it elsewhere."""
        log_path = Path(self._logs.name) / f"{len(self._children)}.log"
        with log_path.open("wb") as log:
            process = self._popen(
                [*within, sys.executable, "-m", "corolla", *arguments, "--json", "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        child = Child(name, process, log_path)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ask all to leave, last started first; end those that do not within the bound."""
        for child in reversed(self._children):
            child.process.terminate()
            child.thaw()  # a stopped process hears nothing
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            _wait_or_kill(child.process, deadline)
        self._children.clear()
        self._logs.cleanup()


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and that are there still."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, check=True)  # noqa: S607 - in PATH
    pairs = [line.split() for line in listing.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def parse_ready(line: bytes) -> Ready:
    """Raises SwarmError when it is not what `--json` prints."""
    try:
        said = json.loads(line)
        span = said["blocks"]
        start, end = map(int, span.split(":")) if span else (0, 0)
        return Ready(PeerId(said["peer"]), (start, end) if span else None, said["addr"])
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise SwarmError(f"expected a ready line, got {line[:200]!r}") from wrong


def _wait_or_kill(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
