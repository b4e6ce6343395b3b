"""Python processes that begin with torch, transformers and hivemind imported: forked off one that waits. For tests.

    with WarmStart() as warm:
        process = warm.popen([sys.executable, "-m", "corolla", "serve", …], stdout=subprocess.PIPE, env=environment)

Starting a server takes ten times as long as what it then does, nearly all of it imports, and the tests start a
hundred. `popen` is called like `subprocess.Popen` and gives a process that is used like its own: a pid, pipes, signals,
an exit code, an interpreter that ends as always. Only its parent is another: the waiting process, which imports,
computes nothing, has one thread, and passes on how its children end. What cannot be had that way (another program,
an environment that an import would have looked at, a system other than Linux) is started from nothing.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Final, Self

_MAX_REQUEST_BYTES: Final = 1 << 17
_READ_LATE: Final = ("COROLLA_", "PYTEST_", "XDG_CACHE_HOME")
"""How variables begin that no import looks at (but huggingface_hub's for XDG_CACHE_HOME: its cache stays ours)."""
_MODULES: Final = (
    "corolla.apps.cli.main", "corolla.apps.cli.serve", "corolla.apps.cli.generate", "corolla.apps.cli.gateway",
    "corolla.server.server", "corolla.server.hosting", "corolla.server.span", "corolla.client.model",
    "torch._dynamo", "transformers.generation", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "uvloop",
)  # fmt: skip


class WarmStart:
    """Owns the process that waits; it ends with the block."""

    def __enter__(self) -> Self:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this module
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # not a terminal: children's output is buffered as in a pipe
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.communicate()

    def popen(
        self,
        args: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> "subprocess.Popen[Any]":
        """As `subprocess.Popen`."""
        environment = dict(os.environ if env is None else env)
        if not self._is_like_ours(args, environment):
            return subprocess.Popen(  # noqa: S603 - what the caller wants
                args, stdin=stdin, stdout=stdout, stderr=stderr, env=env, text=text, start_new_session=start_new_session
            )
        ours: list[int | None] = []
        theirs: list[int] = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            our_end, their_end = _ends(number, wanted)
            ours.append(our_end)
            theirs.append(their_end)
        status, their_status = os.pipe()
        theirs.append(their_status)
        request = json.dumps([list(args[1:]), environment, os.getcwd(), start_new_session]).encode()
        try:
            socket.send_fds(self._control, [request], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return _WarmProcess(args, int(self._control.recv(64)), status, ours, text=text)

    def _is_like_ours(self, args: Sequence[str], environment: Mapping[str, str]) -> bool:
        known = (sys.executable, "-m", "corolla"), (sys.executable, "-c")
        return any(tuple(args[: len(words)]) == words for words in known) and (
            _read_early(environment) == _read_early(self._environment)
        )


class _WarmProcess(subprocess.Popen[Any]):
    """A process that another one has started for us, and tells us the end of."""

    def __init__(self, args: Sequence[str], pid: int, status: int, pipes: Sequence[int | None], *, text: bool) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | Any = None  # as subprocess.Popen declares it
        self._status = status
        suffix = "" if text else "b"
        stdin, stdout, stderr = pipes
        self.stdin = None if stdin is None else open(stdin, "w" + suffix)  # noqa: SIM115 - closed as Popen's own
        self.stdout = None if stdout is None else open(stdout, "r" + suffix)  # noqa: SIM115
        self.stderr = None if stderr is None else open(stderr, "r" + suffix)  # noqa: SIM115

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._take_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take_status()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Unlike Popen's it ends a process that takes too long."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with ThreadPoolExecutor(2) as pool:
            reading = [None if pipe is None else pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            if self.stdin is not None:
                if input:
                    self.stdin.write(input)
                self.stdin.close()
            try:
                self.wait(timeout)
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                out, err = (None if one is None else one.result(left_s) for one in reading)
            except (subprocess.TimeoutExpired, TookTooLong):
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        return out, err

    def __exit__(
        self, exc_type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def __del__(self) -> None:
        """Nothing: who started it reaps it."""

    def _take_status(self) -> None:
        told = os.read(self._status, 64)
        os.close(self._status)
        self.returncode = int(told) if told else -signal.SIGKILL  # the waiting process is gone, and all with it


def _ends(number: int, wanted: int | IO[Any] | None) -> tuple[int | None, int]:
    """Our end of a standard stream (None: it is no pipe) and the other one's."""
    if wanted == subprocess.PIPE:
        reader, writer = os.pipe()
        return (writer, reader) if number == 0 else (reader, writer)
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    descriptor = number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()
    return None, os.dup(descriptor)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_READ_LATE)}


# --- in the process that waits


@dataclass(frozen=True, slots=True)
class _Request:
    """What a child shall run."""

    words: list[str]
    """After the interpreter: `-m corolla …` or `-c CODE …`."""
    environment: dict[str, str]
    directory: str
    is_session: bool


def main() -> None:
    """Import, then wait; returns only in children, when what they were to run has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who started us; SIGTERM ends us as well
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # one to a child just forked waits until that runs
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    gc.collect()
    gc.freeze()  # children's collections do not touch, and so do not copy, what all share
    _run(_wait_for_request(control))


def _import_all() -> None:
    from corolla.models.frugal import import_modeling
    from corolla.net.libp2p import lean

    import_modeling()
    for name in _MODULES:
        importlib.import_module(name)
    lean.hivemind()


def _wait_for_request(control: socket.socket) -> _Request:
    """Forks for each request; returns in the child."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _pass_on_ends(statuses)
        if control in ready:
            data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
            if not data:
                sys.exit()
            *streams, status = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for descriptor in (woken, wake, status, *statuses.values()):
                    os.close(descriptor)
                for number, descriptor in enumerate(streams):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return _Request(*json.loads(data))
            statuses[pid] = status
            for descriptor in streams:
                os.close(descriptor)
            control.send(str(pid).encode())


def _pass_on_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = statuses.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(descriptor)


def _run(request: _Request) -> None:
    """As the interpreter would have begun with these words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if request.is_session:
        os.setsid()
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    kind, what, *arguments = request.words
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
