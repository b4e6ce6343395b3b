"""Processes forked off one that has imported everything: used like any other, and they end like any other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from corolla.apps.warm import WarmStart

pytestmark = pytest.mark.slow

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

TELL = """
import os, sys
print("torch" in sys.modules, sys.argv, os.getpid(), os.getsid(0) == os.getpid(), os.environ.get("COROLLA_SAID"))
print(sys.stdin.read(), end="", file=sys.stderr)
sys.exit(7)
"""
WAIT = "import time; print('waiting', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    with WarmStart() as warm:
        yield warm


def run(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


@pytest.mark.parametrize("is_session", [True, False])
def test_it_has_imported_torch_and_is_else_what_was_asked_for(warm: WarmStart, is_session: bool) -> None:
    environment = ENVIRONMENT | {"COROLLA_SAID": "so"}
    with warm.popen(run(TELL, "a", "b"), env=environment, start_new_session=is_session, **PIPES) as process:
        out, err = process.communicate("heard", timeout=60)
    assert out == f"True ['-c', 'a', 'b'] {process.pid} {is_session} so\n"
    assert err == "heard"
    assert process.returncode == 7


def test_a_command_line_runs_as_in_a_process_of_its_own(warm: WarmStart) -> None:
    for words in (["--version"], ["serve"], ["nonesuch"]):
        command = [sys.executable, "-m", "corolla", *words]
        cold = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
        with warm.popen(command, env=ENVIRONMENT, **PIPES) as process:
            assert process.communicate(timeout=60) == (cold.stdout, cold.stderr)
        assert process.returncode == cold.returncode


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it_and_is_told(warm: WarmStart, kind: signal.Signals) -> None:
    with warm.popen(run(WAIT), env=ENVIRONMENT, **PIPES) as process:
        assert process.stdout.readline() == "waiting\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.send_signal(kind)
        assert process.wait(timeout=60) == -kind
    assert not psutil.pid_exists(process.pid)


def test_an_interrupt_is_an_exception_there(warm: WarmStart) -> None:
    with warm.popen(run(WAIT), env=ENVIRONMENT, **PIPES) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT


def test_an_interrupt_at_once_is_not_lost(warm: WarmStart) -> None:
    for _ in range(20):
        with warm.popen(run(WAIT), env=ENVIRONMENT, **PIPES) as process:
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]


def test_what_takes_too_long_to_communicate_is_ended(warm: WarmStart) -> None:
    with warm.popen(run(WAIT), env=ENVIRONMENT, **PIPES) as process, pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.2)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("command", [run(TELL), ["env", *run(TELL)]])
def test_what_imports_would_have_seen_starts_from_nothing(warm: WarmStart, command: list[str]) -> None:
    environment = ENVIRONMENT | ({} if command[0] == "env" else {"OMP_NUM_THREADS": "2"})
    with warm.popen(command, env=environment, **PIPES) as process:
        assert process.communicate("", timeout=60)[0].startswith("False ")
    assert process.returncode == 7


def test_the_process_that_waits_ends_with_the_block() -> None:
    with WarmStart() as warm, warm.popen(run(WAIT), env=ENVIRONMENT, **PIPES) as process:
        process.stdout.readline()
        waiting = psutil.Process(process.pid).parent()
        assert waiting is not None
        assert waiting.pid != os.getpid()
        process.kill()
    assert not waiting.is_running()
