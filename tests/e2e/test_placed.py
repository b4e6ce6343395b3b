"""Servers that are told no span find their own; one that nobody can dial back serves none."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Processes
from corolla.apps.warm import WarmStart

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 180.0


def test_two_servers_that_start_together_share_the_blocks_between_them(
    tiny: Path, tmp_path: Path, warm: WarmStart
) -> None:
    with Processes({**ONE_THREAD, "XDG_CACHE_HOME": str(tmp_path)}, popen=warm.popen) as processes:
        deadline = time.monotonic() + START_TIMEOUT_S
        boot = processes.start("the bootstrap peer", "bootstrap").wait_ready(deadline).addr
        placed = ["serve", str(tiny), "--num-blocks", "3", "--join", boot]
        servers = [processes.start(f"server {number}", *placed) for number in range(2)]
        assert {server.wait_ready(deadline).blocks for server in servers} == {(0, 3), (3, 6)}


def test_a_server_that_no_peer_can_dial_back_is_not_announced_and_says_why(
    tiny: Path, tmp_path: Path, corolla: Callable[..., subprocess.CompletedProcess[str]], warm: WarmStart
) -> None:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        boot = processes.start("the bootstrap peer", "bootstrap").wait_ready(time.monotonic() + START_TIMEOUT_S).addr
        unreachable = ("--announce", "127.0.0.1:1", "--join", boot)  # where nothing listens
        ended = corolla("serve", tiny, "--blocks", "0:2", *unreachable, XDG_CACHE_HOME=str(tmp_path))
        assert ended.returncode == 1
        assert "ready" not in ended.stdout
        assert "1 peer tried" in ended.stderr.splitlines()[-1]
        assert "--announce" in ended.stderr.splitlines()[-1]
        assert '"models": []' in corolla("status", "--json", "--join", boot).stdout
