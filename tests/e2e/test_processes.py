"""Processes and their ends: killed or told to leave, they leave nothing behind, here or on other peers."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Child, Processes
from corolla.apps.warm import WarmStart
from corolla.client.config import ClientConfig
from corolla.client.connection import Connection
from corolla.client.model import DistributedModelForCausalLM
from corolla.errors import CacheFull, SwarmError
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.net.libp2p.config import NetworkConfig
from corolla.swarm.watch import Watcher

pytestmark = pytest.mark.slow

Corolla = Callable[..., subprocess.CompletedProcess[str]]
Running = Callable[..., AbstractContextManager[subprocess.Popen[str]]]

START_TIMEOUT_S = 180.0
GONE_WITHIN_S = 60.0
PROMPT = torch.arange(3, 11)[None]
NEW_TOKENS = 240
CACHE_TOKENS = 256
"""Of each server: room for one session of this length and no second."""
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

CLIENT = """
import sys, time
import torch
from corolla import AutoDistributedModelForCausalLM

class Slow:
    def put(self, tokens):
        print("token", flush=True)
        time.sleep(0.05)
    def end(self):
        pass

model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[1], initial_peers=[sys.argv[2]])
tokens = model.generate(torch.arange(3, 11)[None], max_new_tokens=int(sys.argv[3]), streamer=Slow(),
                        do_sample=False, pad_token_id=0, eos_token_id=None)
print(tokens.tolist(), flush=True)
"""


@dataclass(slots=True)
class SmallSwarm:
    """A bootstrap peer and two servers of half the model each."""

    model: Path
    processes: Processes
    address: str
    servers: dict[str, Child] = field(default_factory=dict[str, Child])

    def serve(self, *spans: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        for span in spans:
            words = ["--blocks", span, "--cache-tokens", str(CACHE_TOKENS), "--join", self.address]
            self.servers[span] = self.processes.start(f"server {span}", "serve", str(self.model), *words)
        for span in spans:
            self.servers[span].wait_ready(deadline)


@pytest.fixture(scope="module")
def swarm(tiny: Path, warm: WarmStart) -> Iterator[SmallSwarm]:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        bootstrap = processes.start("the bootstrap peer", "bootstrap")
        small = SmallSwarm(tiny, processes, bootstrap.wait_ready(time.monotonic() + START_TIMEOUT_S).addr)
        small.serve("0:3", "3:6")
        yield small


@pytest.fixture(scope="module")
def neighbour(swarm: SmallSwarm) -> Iterator[DistributedModelForCausalLM]:
    """Another client of the same servers, in this process."""
    model = AutoDistributedModelForCausalLM.from_pretrained(swarm.model, initial_peers=[swarm.address])
    yield model
    model.close()


@pytest.fixture(scope="module")
def expected(tiny: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).generate(PROMPT, **GREEDY)


@pytest.fixture
def client(running: Running, swarm: SmallSwarm) -> Iterator[subprocess.Popen[str]]:
    """A client process in the middle of a generation."""
    with running([sys.executable, "-c", CLIENT, str(swarm.model), swarm.address, str(NEW_TOKENS)]) as process:
        assert process.stdout is not None
        for _ in range(6):
            assert process.stdout.readline() == "token\n"
        yield process


def family_of(pid: int) -> list[psutil.Process]:
    """The process and its network daemon."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    assert [member.name() for member in family[1:]] == ["p2pd"]
    return family


def assert_gone(family: Sequence[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while alive := [process for process in family if not has_ended(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    """A zombie has: it only waits for whoever adopted it to ask."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_client_leaves_no_process_and_no_cache_behind(
    client: subprocess.Popen[str], neighbour: DistributedModelForCausalLM, expected: torch.Tensor
) -> None:
    with pytest.raises(CacheFull):
        neighbour.generate(PROMPT, **GREEDY)
    family = family_of(client.pid)
    assert client.poll() is None
    client.kill()
    assert_gone(family)
    assert torch.equal(neighbour.generate(PROMPT, **GREEDY), expected)


def test_a_killed_server_leaves_no_process_and_with_another_in_its_place_the_generation_goes_on(
    client: subprocess.Popen[str], swarm: SmallSwarm, neighbour: DistributedModelForCausalLM, expected: torch.Tensor
) -> None:
    victim = swarm.servers["3:6"].process
    family = family_of(victim.pid)
    victim.kill()
    assert_gone(family)
    swarm.serve("3:6")
    out, err = client.communicate(timeout=200)
    assert client.returncode == 0, err
    assert out.splitlines()[-1] == str(expected.tolist())
    assert torch.equal(neighbour.generate(PROMPT, **GREEDY), expected)  # so all cache was given back


# --- leaving

LONG_PROMPT = torch.arange(2048)[None] % 32000
"""Takes one core more than a second through S."""


@pytest.fixture(scope="module")
def busy_servers(running: Running, model_s: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Servers of S, each in a swarm of its own: a test each, since none survives it."""
    with ExitStack() as stack:
        yield [stack.enter_context(running("serve", model_s)) for _ in range(2)]


def address_in(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().rpartition("addr=")[2].strip()


def wait_until_it_computes(server: subprocess.Popen[str]) -> None:
    process, deadline = psutil.Process(server.pid), time.monotonic() + START_TIMEOUT_S
    idle_s = process.cpu_times().user
    while process.cpu_times().user < idle_s + 0.3:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_told_to_leave_a_server_says_so_and_ends_the_running_step(
    busy_servers: list[subprocess.Popen[str]], model_s: Path
) -> None:
    server = busy_servers.pop()
    model = AutoDistributedModelForCausalLM.from_pretrained(model_s, initial_peers=[address_in(server)])
    family = family_of(server.pid)
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        answer = pool.submit(model, LONG_PROMPT, logits_to_keep=1)
        wait_until_it_computes(server)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=100)
        logits = answer.result(timeout=100).logits
    model.close()
    assert (server.returncode, out) == (0, "")
    assert "leaving (SIGTERM); a second signal ends at once" in err
    local = AutoModelForCausalLM.from_pretrained(model_s, dtype=torch.float32)
    with torch.no_grad():
        assert (logits - local(LONG_PROMPT, logits_to_keep=1).logits).abs().max() <= 1e-5
    assert_gone(family)


def test_a_second_signal_ends_a_server_at_once(busy_servers: list[subprocess.Popen[str]], model_s: Path) -> None:
    server = busy_servers.pop()
    model = AutoDistributedModelForCausalLM.from_pretrained(
        model_s, initial_peers=[address_in(server)], config=ClientConfig(wait_for_servers_s=1.0)
    )
    family = family_of(server.pid)
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        answer = pool.submit(model, LONG_PROMPT, logits_to_keep=1)
        wait_until_it_computes(server)
        server.send_signal(signal.SIGINT)
        assert server.stderr is not None
        while "leaving (SIGINT)" not in server.stderr.readline():
            assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == -signal.SIGINT  # by the signal: not because its drain was over
        with pytest.raises(SwarmError):
            answer.result(timeout=100)
    model.close()
    assert_gone(family)


def test_a_server_is_announced_when_it_is_ready_and_not_listed_once_it_has_left(
    corolla: Corolla, running: Running, tiny: Path
) -> None:
    with running("bootstrap") as bootstrap:
        address = address_in(bootstrap)
        connection = Connection(NetworkConfig(is_client=True), ClientConfig(), [address])
        watcher = Watcher(connection.swarm.transport, fingerprint(open_checkpoint(tiny)))
        with running("serve", tiny, "--join", address) as server, ThreadPoolExecutor(1) as pool:
            ready = pool.submit(address_in, server)
            while not connection.run(watcher.refresh()).servers:
                assert not ready.done(), "it said `ready` before it was announced"
                time.sleep(0.05)
            assert ready.result(timeout=20)
            server.terminate()
            assert server.wait(timeout=60) == 0
        deadline = time.monotonic() + 60  # its last record lives on for three minutes
        while servers_listed(corolla, address):
            assert time.monotonic() < deadline
        connection.close()


def servers_listed(corolla: Corolla, address: str) -> list[str]:
    models = json.loads(corolla("status", "--json", "--join", address).stdout)["models"]
    return [server["peer"] for model in models for server in model["servers"]]
