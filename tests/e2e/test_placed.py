"""Servers that are told no span find their own, so that together they cover the model."""

import time
from pathlib import Path

import pytest

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Processes

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 90.0


def test_two_servers_that_start_together_share_the_blocks_between_them(tiny: Path, tmp_path: Path) -> None:
    with Processes({**ONE_THREAD, "XDG_CACHE_HOME": str(tmp_path)}) as processes:
        deadline = time.monotonic() + START_TIMEOUT_S
        boot = processes.start("the bootstrap peer", "bootstrap").wait_ready(deadline).addr
        placed = ["serve", str(tiny), "--num-blocks", "3", "--join", boot]
        servers = [processes.start(f"server {number}", *placed) for number in range(2)]
        assert {server.wait_ready(deadline).blocks for server in servers} == {(0, 3), (3, 6)}
