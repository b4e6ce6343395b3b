"""`corolla key new`: a key that every command takes, in a file that nobody else reads."""

import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from corolla.apps.cli import main as frame
from corolla.apps.cli import status
from corolla.apps.cli.network import client_network, server_network
from corolla.apps.cli.options import join_option, listen_options
from corolla.apps.cli.settings import RunSettings
from corolla.errors import NoPeers
from corolla.net.memory.transport import identity_of
from corolla.net.swarm_key import load_keys

NEW = [sys.executable, "-m", "corolla", "key", "new"]


def test_a_redirected_key_is_readable_by_its_owner_only_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.touch(0o644)
    with path.open("w") as file:
        subprocess.run(NEW, stdout=file, check=True, timeout=30)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().count("\n") == 1
    assert len(load_keys([path])) == 1


def test_every_key_is_another() -> None:
    assert len({subprocess.run(NEW, stdout=subprocess.PIPE, check=True, timeout=30).stdout for _ in range(2)}) == 2


def test_the_flags_reach_the_network_of_servers_and_clients(tmp_path: Path) -> None:
    key, allow = tmp_path / "swarm.key", tmp_path / "allow"
    write_key(key)
    allow.write_text(f"{identity_of('a').peer}\n")

    @click.command()
    @join_option
    @listen_options
    def command(**_options: object) -> None:
        server = server_network(listen=(), announce=(), identity=None)
        assert server.gate.keys == client_network().gate.keys == load_keys([key])
        assert server.gate.allowed == {identity_of("a").peer}
        click.echo("seen")

    arguments = ["--swarm-key", str(key), "--allow", str(allow)]
    assert CliRunner().invoke(command, arguments, obj=RunSettings(), catch_exceptions=False).output == "seen\n"


def test_a_loose_key_file_ends_the_command_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "swarm.key"
    key.write_text("anything")
    key.chmod(0o644)
    assert frame.run(["status", "--join", "/ip4/127.0.0.1/tcp/1/p2p/x", "--swarm-key", str(key)]) == 2
    assert f"chmod 600 {key}" in capsys.readouterr().err


@pytest.mark.slow
def test_status_of_a_private_swarm_needs_its_key_and_no_key_shows_in_any_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "JOIN_TIMEOUT_S", 2.0)
    ours, theirs = (write_key(tmp_path / name) for name in ("ours", "theirs"))
    command = [sys.executable, "-m", "corolla", "bootstrap", "--swarm-key", str(ours), "--log-level", "debug"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            join = ["status", "--json", "--join", line.strip().partition("addr=")[2]]
            assert frame.run([*join, "--swarm-key", str(ours)]) == 0
            assert frame.run([*join, "--swarm-key", str(theirs)]) == NoPeers.exit_code
            assert frame.run(join) == NoPeers.exit_code
            said = capsys.readouterr()
            assert "private" in said.err
        finally:
            process.terminate()
            out, err = process.communicate(timeout=20)
    secret = ours.read_text().strip().partition(":")[2]
    assert secret not in line + out + err + said.out + said.err


def write_key(path: Path) -> Path:
    with path.open("w") as file:
        subprocess.run(NEW, stdout=file, check=True, timeout=30)
    return path
