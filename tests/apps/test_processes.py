"""Child processes: known when ready, and none outlives its parent, however that ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from corolla.apps.processes import STOP_TIMEOUT_S, Processes, parse_ready
from corolla.errors import SwarmError

PARENT = """
import time
from corolla.apps.processes import Processes

with Processes() as processes:
    children = [processes.start(f"peer {number}", "bootstrap") for number in range(2)]
    for child in children:
        child.wait_ready(time.monotonic() + 30)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_ready_line_is_read() -> None:
    ready = parse_ready(b'{"peer": "12D3", "blocks": "0:10", "addr": "/ip4/127.0.0.1/tcp/1/p2p/12D3"}\n')
    assert (ready.peer, ready.blocks, ready.addr) == ("12D3", (0, 10), "/ip4/127.0.0.1/tcp/1/p2p/12D3")
    assert parse_ready(b'{"peer": "12D3", "blocks": null, "addr": "/x"}\n').blocks is None


@pytest.mark.parametrize("line", [b"hello\n", b"[]\n", b'{"peer": "x"}\n', b'{"peer": "x", "blocks": "1", "addr": ""}'])
def test_what_is_no_ready_line_is_refused(line: bytes) -> None:
    with pytest.raises(SwarmError, match="expected a ready line"):
        parse_ready(line)


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with Processes() as processes:
        child = processes.start("the peer", "bootstrap", "--listen", "nonsense")
        with pytest.raises(SwarmError, match=r"the peer ended before it was ready; it said: .*nonsense"):
            child.wait_ready(time.monotonic() + 30)


def test_a_child_that_takes_too_long_is_given_up_on() -> None:
    with Processes() as processes:
        child = processes.start("the peer", "bootstrap")
        with pytest.raises(SwarmError, match="the peer was not ready in time"):
            child.wait_ready(time.monotonic())
        process = psutil.Process(child.process.pid)
    assert not process.is_running()


def interrupt(parent: subprocess.Popen[bytes]) -> None:
    parent.send_signal(signal.SIGINT)


def kill(parent: subprocess.Popen[bytes]) -> None:
    parent.kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", [interrupt, kill, subprocess.Popen.terminate])
def test_no_process_outlives_its_parent(end: Callable[[subprocess.Popen[bytes]], None]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 4  # two peers, each with its network daemon
    end(parent)
    parent.wait(timeout=STOP_TIMEOUT_S + 60)
    parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.slow
def test_a_family_is_frozen_thawed_and_killed_together() -> None:
    with Processes() as processes:
        child = processes.start("the peer", "bootstrap")
        child.wait_ready(time.monotonic() + 30)
        family = [psutil.Process(child.process.pid), psutil.Process(child.daemon_pid)]
        child.freeze()
        assert states_of(family, psutil.STATUS_STOPPED) == {psutil.STATUS_STOPPED}
        child.thaw()
        assert psutil.STATUS_STOPPED not in states_of(family, psutil.STATUS_SLEEPING)
        child.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        with pytest.raises(SwarmError, match="it has 0"):
            _ = child.daemon_pid


@pytest.mark.slow
def test_a_frozen_child_ends_with_the_others() -> None:
    with Processes() as processes:
        child = processes.start("the peer", "bootstrap")
        child.wait_ready(time.monotonic() + 30)
        child.freeze()
        began = time.monotonic()
    assert child.process.returncode == 0
    assert time.monotonic() - began < STOP_TIMEOUT_S


def states_of(family: list[psutil.Process], wanted: str) -> set[str]:
    """Their states, once all are as wanted; a signal takes a moment to arrive."""
    deadline = time.monotonic() + 5
    while {process.status() for process in family} != {wanted} and time.monotonic() < deadline:
        time.sleep(0.01)
    return {process.status() for process in family}
