"""How serving processes end: well on the first signal, at once on the second, and with their parent."""

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest

SERVE = """
import asyncio
from corolla.apps.cli.leaving import leave_with_parent, run_until_stopped

async def serve(stop, ready):
    try:
        {body}
    finally:
        print("cleaned up", flush=True)

{setup}
run_until_stopped(serve)
"""
READY_THEN_STOP = "ready(); print('ready', flush=True); await stop.wait()"
READY_AND_DEAF = "ready(); print('ready', flush=True); await asyncio.sleep(60)"
NEVER_READY = "print('ready', flush=True); await asyncio.sleep(60)"


@contextmanager
def serving(body: str, setup: str = "") -> Generator[subprocess.Popen[str]]:
    """A process that has printed its first line."""
    code = SERVE.format(body=body, setup=setup)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_it_well(kind: signal.Signals) -> None:
    with serving(READY_THEN_STOP) as process:
        process.send_signal(kind)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "cleaned up\n"
    assert f"leaving ({kind.name})" in err


def test_the_second_signal_ends_it_at_once() -> None:
    with serving(READY_AND_DEAF) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "leaving" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_a_signal_before_it_is_ready_ends_it_too() -> None:
    with serving(NEVER_READY) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "cleaned up\n"


def test_it_leaves_well_also_when_nobody_reads_what_it_says() -> None:
    with serving(READY_THEN_STOP) as process:
        assert process.stderr is not None
        process.stderr.close()
        process.terminate()
        assert process.wait(timeout=10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "cleaned up\n"


def test_it_leaves_when_its_parent_is_gone() -> None:
    with serving(READY_THEN_STOP, setup="leave_with_parent()") as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "cleaned up\n"


def test_what_fails_while_serving_comes_out() -> None:
    with serving("ready(); print('ready', flush=True); raise ValueError('broken')") as process:
        _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "ValueError: broken" in err
