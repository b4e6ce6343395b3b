"""`demo --kill`, with a tiny random model: a server really dies, and both texts are the local model's."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.apps.demo.side_by_side import SideBySide
from corolla.models.testing import write_tiny

QUESTION = "w9 w10 w11"
SHOW = """
import sys
from pathlib import Path
from corolla.apps.demo.demo import Plan, Stage
from corolla.apps.demo.kill import show_kill

spans = ((0, 2), (2, 4), (4, 6), (2, 4))
show_kill(Plan(Path(sys.argv[1]), spans, sys.argv[2], max_new_tokens=24), Stage())
"""


def local_answer(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = local.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_a_server_is_killed_and_both_answers_are_the_local_models(
    tmp_path: Path, write_tokenizer: Callable[[Path], None]
) -> None:
    write_tiny(tmp_path, "llama")
    write_tokenizer(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(tmp_path), QUESTION],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    expected = local_answer(tmp_path)
    assert lines[lines.index("undisturbed:") + 1] == expected
    before, _, rest = lines[lines.index("a server is killed:") + 1].partition(" [server ")
    victim, _, after = rest.partition(" killed] ")
    assert (before + after).split() == expected.split()
    assert before
    assert after
    routes = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("0:2", "2:4", "4:6"))}
    assert routes["0:2"] == ["server", "A", "server", "A"]
    assert routes["2:4"] == ["server", victim, "server", {"B": "D", "D": "B"}[victim]]
    assert any("the two texts are the same" in line for line in lines)
    (wait_s,) = (float(line.split()[-8]) for line in lines if line.startswith("the longest wait for a token"))
    assert wait_s > 0


def draw(*, width: int, is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=is_terminal, no_color=True, highlight=False)
    with SideBySide(console) as columns:
        columns.begin("left")
        columns.write("one text")
        columns.begin("right")
        columns.write("the ")
        columns.mark("cut")
        columns.write("other")
    return re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", out.getvalue())


def test_a_terminal_gets_two_columns() -> None:
    shown = draw(width=100, is_terminal=True)
    assert any("one text" in line and "the  [cut] other" in line for line in shown.splitlines())


@pytest.mark.parametrize(("width", "is_terminal"), [(100, False), (60, True)])
def test_elsewhere_one_text_follows_the_other(width: int, is_terminal: bool) -> None:
    shown = draw(width=width, is_terminal=is_terminal)
    assert [line for line in shown.splitlines() if line] == ["left:", "one text", "right:", "the  [cut] other"]
