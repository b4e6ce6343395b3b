"""`corolla bootstrap`, as processes: one ready line, a stable identity, and a good end."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corolla.apps.cli import main as frame
from corolla.apps.cli import status
from corolla.errors import NoPeers

pytestmark = pytest.mark.slow

READY = re.compile(r"ready peer=(12D3KooW\w+) addr=(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\1)\n")


@contextmanager
def bootstrap(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A running bootstrap peer and its first line."""
    command = [sys.executable, "-m", "corolla", "bootstrap", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            if process.poll() is None:
                process.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_it_says_once_that_it_is_ready_and_leaves_well(kind: signal.Signals) -> None:
    with bootstrap() as (process, line):
        assert READY.fullmatch(line)
        process.send_signal(kind)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""
    assert "leaving" in err


def test_it_is_the_same_peer_with_the_same_identity_file(tmp_path: Path) -> None:
    peers: list[str] = []
    for _ in range(2):
        with bootstrap("--json", "--identity", str(tmp_path / "key")) as (_, line):
            said = json.loads(line)
        assert said.keys() == {"peer", "blocks", "addr"}
        assert said["blocks"] is None
        peers.append(said["peer"])
    assert peers[0] == peers[1]


def test_it_joins_another_and_status_finds_both_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with bootstrap() as (_, first):
        address = READY.fullmatch(first)[2]  # pyright: ignore[reportOptionalSubscript]
        with bootstrap("--join", address) as (_, second):
            assert READY.fullmatch(second)
            assert frame.run(["status", "--json", "--join", address]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}


def test_a_port_in_use_is_named_without_a_traceback() -> None:
    port = free_port()
    with bootstrap("--listen", f"127.0.0.1:{port}") as (_, line):
        assert f"/tcp/{port}/" in line
        with bootstrap("--listen", f"127.0.0.1:{port}") as (process, nothing):
            _, err = process.communicate(timeout=20)
    assert nothing == ""
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in err
    assert "Traceback" not in err


def test_an_unreadable_identity_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"not a key")
    (tmp_path / "key").chmod(0o600)
    with bootstrap("--identity", str(tmp_path / "key")) as (process, nothing):
        _, err = process.communicate(timeout=20)
    assert nothing == ""
    assert process.returncode == 2
    assert str(tmp_path / "key") in err
    assert "Traceback" not in err


def test_status_of_a_swarm_that_does_not_answer_names_where_it_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "JOIN_TIMEOUT_S", 1.0)
    with bootstrap() as (_, line):
        peer = READY.fullmatch(line)[1]  # pyright: ignore[reportOptionalSubscript]
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer}"
    assert frame.run(["status", "--join", address]) == NoPeers.exit_code
    err = capsys.readouterr().err
    assert address in err
    assert "1 s" in err
