"""`corolla gateway` as a process over real servers: an answer goes on when a server is killed, and it ends well."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.gateway.keys import line_for, new_key
from corolla.apps.processes import Child, Processes
from corolla.apps.warm import WarmStart

pytestmark = pytest.mark.slow

Corolla = Callable[..., subprocess.CompletedProcess[str]]
Running = Callable[..., AbstractContextManager[subprocess.Popen[str]]]

START_TIMEOUT_S = 180.0
NEW_TOKENS = 120
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "w9 w10"}],
    "temperature": 0,
    "max_tokens": NEW_TOKENS,
}


@pytest.fixture(scope="module")
def servers(tiny: Path, warm: WarmStart) -> Iterator[tuple[dict[str, Child], str]]:
    """Two that could each do the second half, and the address to join."""
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        deadline = time.monotonic() + START_TIMEOUT_S
        first = processes.start("server 0:3", "serve", str(tiny), "--blocks", "0:3")
        address = first.wait_ready(deadline).addr
        others = [
            processes.start(f"server {n}", "serve", str(tiny), "--blocks", "3:6", "--join", address) for n in "ab"
        ]
        yield {str(other.wait_ready(deadline).peer): other for other in others}, address


def test_a_killed_server_costs_a_pause_and_nothing_of_the_answer(
    running: Running, servers: tuple[dict[str, Child], str], tiny: Path, tmp_path: Path
) -> None:
    children, address = servers
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompt = torch.tensor([tokenizer.apply_chat_template(ASKED["messages"], add_generation_prompt=True)["input_ids"]])
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)

    key, file = new_key(), tmp_path / "api.keys"
    file.write_text(line_for("tester", key))
    words = ["gateway", tiny, "--join", address, "--listen", "127.0.0.1:0", "--api-keys", file]
    with running(*words) as gateway:
        assert gateway.stdout is not None
        line = gateway.stdout.readline()
        assert line.startswith("ready url=http://127.0.0.1:"), gateway.communicate()[1]
        family = [psutil.Process(gateway.pid), *psutil.Process(gateway.pid).children(recursive=True)]
        with httpx.Client(
            base_url=line.removeprefix("ready url=").strip(), timeout=60, headers={"authorization": f"Bearer {key}"}
        ) as http:
            assert http.get("/ready").json() == {"status": "ready", "lacking": {}}
            assert http.get("/").headers["content-type"].startswith("text/html")
            said = http.post("/v1/chat/completions", json={**ASKED, "model": "tiny", "max_tokens": 2}).json()
            # The next answer goes on in this one's session, so over the same servers.
            used = next(hop["peer"] for hop in said["corolla"]["route"] if hop["peer"] in children)
            text, is_killed = "", False
            body = {**ASKED, "model": "tiny", "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                for event in answer.iter_lines():
                    if event.startswith("data: {"):
                        chunk = json.loads(event[6:])
                        text += chunk["choices"][0]["delta"].get("content", "")
                        if not is_killed and len(text.split()) > 10:
                            is_killed = True
                            children[used].kill()
            assert is_killed
            assert text == expected
            assert http.get("/metrics", headers={"authorization": "none"}).status_code == 401
            numbers = http.get("/metrics").text
            assert 'corolla_gateway_recoveries_total{model="tiny"} 1.0' in numbers
            assert re.search(r'^corolla_gateway_dht_calls_made_total{kind="find"} [1-9]', numbers, re.MULTILINE)
        gateway.terminate()
        out, err = gateway.communicate(timeout=60)
    assert gateway.returncode == 0, err
    assert "w9 w10" not in err
    assert key not in out + err
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_what_cannot_be_served_is_one_sentence(corolla: Corolla, tiny: Path, tmp_path: Path) -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2"
    (tmp_path / "keys").write_text("alice secret\n")
    for words, said in (
        (("--listen", "0.0.0.0:0"), "--api-keys FILE"),
        (("--api-keys", tmp_path / "keys"), "expected NAME sha256:HASH"),
        (("--api-keys", tmp_path / "none"), "cannot read the API keys"),
        (("--cors", "*"), "name the origins"),
    ):
        done = corolla("gateway", tiny, "--join", nobody, *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
