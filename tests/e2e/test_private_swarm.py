"""A whole private swarm as processes: members generate, others get nothing."""

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from corolla.errors import NoPeers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Corolla = Callable[..., subprocess.CompletedProcess[str]]
Running = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    return line.strip().rpartition("addr=")[2]


def test_two_servers_and_a_client_with_the_key_do_the_work_and_without_it_nobody_answers(
    corolla: Corolla, running: Running, tiny: Path, tmp_path: Path
) -> None:
    key = tmp_path / "swarm.key"
    key.touch(0o600)
    key.write_text(corolla("key", "new").stdout)
    with_key = ("--swarm-key", key)
    prompt = ("generate", tiny, "w5 w6 w7", "--max-new-tokens", 8, "--join")
    with running("serve", tiny, "--blocks", "0:3", *with_key) as first:
        address = address_of(first)
        with running("serve", tiny, "--blocks", "3:6", "--join", address, *with_key) as second:
            address_of(second)
            member = corolla(*prompt, address, COROLLA_SWARM_KEY=str(key))
            stranger = corolla(*prompt, address)
    assert member.returncode == 0, member.stderr
    assert len(member.stdout.split()) == 8
    assert stranger.returncode == NoPeers.exit_code
    assert stranger.stdout == ""
    assert "does not answer: this swarm is private: the swarm key is missing" in stranger.stderr
