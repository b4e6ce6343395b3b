"""Start-up: a client's process start to its first token, and a server's to `ready`, with S.

Once more as a first start on this machine: later ones find in the user's cache how fast their blocks are.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from corolla.apps.bench.setup import (
    ONE_THREAD,
    READY_TIMEOUT_S,
    describe_setup,
    in_rounds,
    model_s,
    spread,
    start_chains,
)
from corolla.apps.processes import Processes

CLIENT = """
import sys
from corolla import AutoDistributedModelForCausalLM
model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[1], initial_peers=[sys.argv[2]])
import torch
model.generate(torch.arange(3, 19)[None], max_new_tokens=1, do_sample=False, pad_token_id=0)
print("token", flush=True)
"""


def run(rounds: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    directory = model_s()
    console.print(f"corolla bench start: {rounds} rounds\n{describe_setup()}")
    with tempfile.TemporaryDirectory() as empty:
        first_s = _ready({"XDG_CACHE_HOME": empty}, directory)
    servers_s = [_ready({}, directory) for _ in in_rounds(range(1, rounds + 1), "server")]
    with Processes(ONE_THREAD) as processes:
        address = start_chains(processes, directory, [2])[0].address
        clients_s = [_first_token(str(directory), address) for _ in in_rounds(range(1, rounds + 1), "client")]
    console.print(f"first start on this machine (nothing in its cache, so it measures its speed): {first_s:.2f} s")
    console.print(f"server start to ready, all 8 blocks: {spread(servers_s, ' s')}: aim ≤ 7 s")
    console.print(f"client process start to first token: {spread(clients_s, ' s')}: aim ≤ 6 s")


def _ready(environment: dict[str, str], directory: Path) -> float:
    """Seconds from a server's start to its ready line."""
    with Processes({**ONE_THREAD, **environment}) as processes:
        began = time.monotonic()
        processes.start("the server", "serve", str(directory)).wait_ready(began + READY_TIMEOUT_S)
        return time.monotonic() - began


def _first_token(directory: str, address: str) -> float:
    began = time.monotonic()
    with subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, "-c", CLIENT, directory, address], stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        line = client.stdout.readline()
        seconds = time.monotonic() - began
        client.wait(timeout=READY_TIMEOUT_S)
    assert line == b"token\n", "the client ended without a token"
    return seconds
