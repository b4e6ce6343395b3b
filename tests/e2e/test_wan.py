"""Hosts of their own with a slow network between them: delays, pulled cables, servers that cannot reach each other.

Needs root, network namespaces and TUN (`tools/wanlab.py`); elsewhere the reason is said and nothing is run.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from corolla.apps.bench.network import NoSlowNetwork, SlowNetwork, slow_network
from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Processes

pytestmark = pytest.mark.slow

RTT_MS = 30.0
CLIENT_HOST = 3
SPANS = ("0:3", "3:6", "3:6")
"""Of the servers on hosts 0, 1 and 2."""
START_TIMEOUT_S = 100.0
CLIENT_TIMEOUT_S = 80.0
NEW_TOKENS = 30
CUT_AT = 8
PROMPT = torch.arange(3, 11)[None]

CLIENT = """
import json, sys
import torch
from corolla import AutoDistributedModelForCausalLM
from corolla.client.config import ClientConfig
from corolla.net.liveness import Liveness

class Teller:
    def put(self, tokens):
        if tokens.numel() == 1:  # not the prompt; the next step waits for the test's word
            print(json.dumps([hop.peer_id for hop in session.route]), flush=True)
            sys.stdin.readline()
    def end(self):
        pass

model = AutoDistributedModelForCausalLM.from_pretrained(
    sys.argv[1], initial_peers=[sys.argv[2]], config=ClientConfig(liveness=Liveness(0.3, 1.0), dial_timeout_s=2.0)
)
with model.inference_session(max_length=100) as session:
    tokens = model.generate(torch.arange(3, 11)[None], max_new_tokens=int(sys.argv[3]), streamer=Teller(),
                            do_sample=False, pad_token_id=0, eos_token_id=None)
print(json.dumps(tokens.tolist()), flush=True)
model.close()
"""

Peers = list[str]


@dataclass(frozen=True, slots=True)
class Told:
    """What a client wrote, and the route it had at each token."""

    text: list[list[int]]
    routes: list[Peers]


RunClient = Callable[..., Told]


@pytest.fixture(scope="module")
def network() -> Iterator[SlowNetwork]:
    try:
        with slow_network(CLIENT_HOST + 1, rtt_ms=RTT_MS, mbit=50) as network:
            yield network
    except NoSlowNetwork as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def servers(network: SlowNetwork, tiny: Path) -> Iterator[Peers]:
    """Addresses of a server on each host, the first of which all others joined."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with Processes(ONE_THREAD) as processes:
        addresses: list[str] = []
        for host, span in enumerate(SPANS):
            words = ["--blocks", span, "--listen", f"{network.address(host)}:0"]
            join = ["--join", addresses[0]] if addresses else []
            server = processes.start(f"server {host}", "serve", str(tiny), *words, *join, within=network.within(host))
            addresses.append(server.wait_ready(deadline).addr)
        yield addresses


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    local = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return local.generate(PROMPT, max_new_tokens=NEW_TOKENS, **options).tolist()


@pytest.fixture
def run_client(network: SlowNetwork, servers: Peers, tiny: Path) -> Iterator[RunClient]:
    """A client on its own host; `at_token` gets the route in use, between two of its steps."""

    def run(at_token: Callable[[Peers], None] | None = None) -> Told:
        command = [sys.executable, "-c", CLIENT, str(tiny), servers[0], str(NEW_TOKENS)]
        with subprocess.Popen(
            [*network.within(CLIENT_HOST), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as client:
            watchdog = threading.Timer(CLIENT_TIMEOUT_S, client.kill)
            watchdog.start()
            try:
                return converse(client, at_token)
            finally:
                watchdog.cancel()

    yield run
    for host in range(CLIENT_HOST):  # whatever a test has cut
        network.heal(host)
        network.heal(0, host)


def converse(client: subprocess.Popen[str], at_token: Callable[[Peers], None] | None) -> Told:
    assert client.stdin is not None
    assert client.stdout is not None
    routes: list[Peers] = []
    for number in range(NEW_TOKENS):
        line = client.stdout.readline()
        assert line, f"no token {number} within {CLIENT_TIMEOUT_S:g} s"
        routes.append(json.loads(line))
        if number == CUT_AT and at_token is not None:
            at_token(routes[-1])
        client.stdin.write("go on\n")
    return Told(json.loads(client.stdout.readline()), routes)


def peer_of(address: str) -> str:
    return address.rpartition("/")[2]


def test_a_swarm_over_a_slow_network_writes_the_same_text(run_client: RunClient, expected: list[list[int]]) -> None:
    assert run_client().text == expected


def test_a_pulled_cable_is_noticed_and_the_text_goes_on(
    run_client: RunClient, network: SlowNetwork, servers: Peers, expected: list[list[int]]
) -> None:
    """No reset comes from an unplugged host: only the missing heartbeats tell."""
    began: list[float] = []

    def unplug_the_tail(route: Peers) -> None:
        network.cut([peer_of(address) for address in servers].index(route[-1]))
        began.append(time.monotonic())

    told = run_client(unplug_the_tail)
    assert told.text == expected
    assert {told.routes[0][-1], told.routes[-1][-1]} == {peer_of(address) for address in servers[1:]}
    assert time.monotonic() - began[0] < 30  # left to the system, a dead connection is noticed after 36 s at best


def test_two_servers_that_cannot_reach_each_other_are_linked_through_the_client(
    run_client: RunClient, network: SlowNetwork, servers: Peers, expected: list[list[int]]
) -> None:
    for other in (1, 2):
        network.cut(0, other)
    told = run_client()
    assert told.text == expected
    assert told.routes[-1][0] == peer_of(servers[0])


def test_a_short_outage_costs_time_and_nothing_else(
    run_client: RunClient, network: SlowNetwork, expected: list[list[int]]
) -> None:
    def blink(_route: Peers) -> None:
        network.cut(0)
        time.sleep(0.5)
        network.heal(0)

    assert run_client(blink).text == expected
