"""Real processes, as servers are: they find the hub by HF_ENDPOINT, share one cache, and may die at any time."""

import os
import subprocess
import sys
import threading
import time

import pytest

from corolla.models.testing_hub import Fault

pytestmark = pytest.mark.slow

HOLD = """
import sys
from corolla.errors import SwarmError
from corolla.models import checkpoint
from corolla.models.source import open_source

checkpoint.FIRST_BYTES = 8
try:
    opened = open_source("someone/tiny", cache_dir=sys.argv[1])
    with opened.hold(opened.tensors):
        print("held", flush=True)
except SwarmError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def start(hub, cache):
    """Starts a process that opens the model and holds all its tensors."""
    started = []

    def run(**environment):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(cache)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_ENDPOINT": hub.endpoint, **environment},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def expected_bytes(tiny):
    """All headers and all tensors: every shard, once."""
    return sum(file.stat().st_size for file in tiny("llama").directory.glob("*.safetensors"))


def test_two_processes_that_start_at_once_download_every_byte_once(hub, start, expected_bytes, tiny):
    processes = [start() for _ in range(2)]
    assert [process.communicate(timeout=200)[0] for process in processes] == ["held\n"] * 2
    assert hub.sent_bytes() == expected_bytes


def test_after_a_kill_the_next_process_goes_on_and_reads_only_what_was_on_the_way(hub, start, expected_bytes, cache):
    stuck, let_go = threading.Event(), threading.Event()
    sent = []

    def hold_up():
        stuck.set()
        let_go.wait(30)

    def fault(request):
        is_data = request.path.endswith("00003-of-00005.safetensors") and request.part and request.part[0] > 8
        return Fault(before=hold_up) if is_data and "resolve" not in request.path and not let_go.is_set() else None

    hub.fault = fault
    first = start()
    assert stuck.wait(30)
    while not {"model-00001-of-00005.safetensors", "model-00005-of-00005.safetensors"} <= recorded(cache):
        assert first.poll() is None
        time.sleep(0.01)
    sent.append(hub.sent_bytes())
    first.kill()
    first.wait()
    let_go.set()
    assert start().communicate(timeout=200)[0] == "held\n"
    assert hub.sent_bytes() - sent[0] <= expected_bytes - sent[0] + longest_shard(hub)


def recorded(cache):
    """Files of which more than the header is written down."""
    return {path.name for path in cache.glob("hub/*/*/.held/*.safetensors") if path.read_text().count("\n") > 2}


def longest_shard(hub):
    return max(file.stat().st_size for file in hub.repositories["someone/tiny"].glob("*.safetensors"))


def test_the_token_of_the_environment_opens_a_gated_repository(hub, start):
    hub.gated.add("someone/tiny")
    refused = start(HF_TOKEN="", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    said = refused.communicate(timeout=200)[0]
    assert refused.returncode == 2
    assert said == (
        f"someone/tiny is gated: ask for access at {hub.endpoint}/someone/tiny, then log in with `hf auth login` or "
        "pass a token (--token, HF_TOKEN)\n"
    )
    assert start(HF_TOKEN=hub.token).communicate(timeout=200)[0] == "held\n"


def test_offline_a_cached_model_opens_and_another_is_refused_at_once(hub, start):
    said = start(HF_HUB_OFFLINE="1").communicate(timeout=200)[0]
    assert said == f"{hub.endpoint} is not asked: HF_HUB_OFFLINE is set\n"
    assert start().communicate(timeout=200)[0] == "held\n"
    asked = len(hub.requests)
    assert start(HF_HUB_OFFLINE="1").communicate(timeout=200)[0] == "held\n"
    assert len(hub.requests) == asked
