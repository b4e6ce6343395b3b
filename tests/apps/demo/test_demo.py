"""The demo, with a tiny random model in place of the real one: what it shows is true, and it leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.models.testing import write_tiny

pytestmark = pytest.mark.slow

SHOW = """
import sys
from pathlib import Path
from corolla.apps.demo.demo import Plan, Stage, show

model, mode, max_new_tokens = sys.argv[1:]
spans = ((0, 2), (2, 4), (4, 6))
show(Plan(Path(model), spans, "w9 w10 w11", is_chat=mode == "chat", max_new_tokens=int(max_new_tokens)), Stage())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny(directory, "llama")
    write_tokenizer(directory)
    return directory


def local_answers(directory: Path, questions: list[str]) -> list[str]:
    """What plain transformers answers, turn by turn."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    messages: list[dict[str, str]] = []
    answers: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = local.generate(**prompt, max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def start(model: Path, mode: str, *, max_new_tokens: int = 8) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SHOW, str(model), mode, str(max_new_tokens)]
    return subprocess.Popen(words, text=True, env=environment, **pipes)


def test_it_shows_the_local_models_answers_and_the_route(model: Path) -> None:
    with start(model, "chat") as demo:
        out, err = demo.communicate("w20 w21\n/exit\n", timeout=250)
    assert demo.returncode == 0, err
    first, second = local_answers(model, ["w9 w10 w11", "w20 w21"])
    lines = [line.strip() for line in out.splitlines()]
    assert first in lines
    assert second in lines
    route = [line.split()[:3] for line in lines if line.startswith(("0:2", "2:4", "4:6"))]
    assert route == [["0:2", "server", "A"], ["2:4", "server", "B"], ["4:6", "server", "C"]]
    assert any("tokens/s" in line for line in lines)


def test_interrupted_while_it_starts_it_leaves_nothing_behind(model: Path) -> None:
    with start(model, "once", max_new_tokens=100) as demo:  # on a busy machine a short answer could be at its end
        assert demo.stderr is not None
        while "serves blocks" not in demo.stderr.readline():
            assert demo.poll() is None
        demo.send_signal(signal.SIGSTOP)  # nor shall it go on while its children are listed
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        demo.send_signal(signal.SIGCONT)
        out, err = demo.communicate(timeout=200)
    assert demo.returncode != 0, f"it was not interrupted:\n{out}\n{err}"
    assert len(family) >= 8  # a bootstrap peer and three servers, each with its network daemon
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
