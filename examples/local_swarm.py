"""A swarm on this machine for the other examples to use: a bootstrap peer and two servers, as separate processes.

The model is small and random, so nothing is downloaded and its words mean nothing. Elsewhere these would be
`corolla bootstrap` and `corolla serve MODEL --blocks A:B --join ADDRESS` on machines of their own.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from corolla.apps.processes import Processes
from corolla.models.testing import write_tiny

SPANS = ("0:3", "3:6")
START_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """What a client must know: the model's directory, and the address of any peer."""

    model: Path
    address: str


@contextmanager
def local_swarm() -> Iterator[LocalSwarm]:
    """A swarm that serves a random llama of six blocks, and ends with the block."""
    with tempfile.TemporaryDirectory() as directory, Processes({"OMP_NUM_THREADS": "1"}) as processes:
        model = write_tiny(Path(directory) / "tiny-llama", "llama")
        deadline = time.monotonic() + START_TIMEOUT_S
        address = processes.start("the bootstrap peer", "bootstrap").wait_ready(deadline).addr
        servers = [
            processes.start(f"the server of {span}", "serve", str(model), "--blocks", span, "--join", address)
            for span in SPANS
        ]
        for server in servers:
            server.wait_ready(deadline)
        yield LocalSwarm(model, address)
