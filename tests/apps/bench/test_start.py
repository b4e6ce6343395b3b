"""What `corolla bench start` starts and says; the processes are none."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.apps.bench import start


def test_one_start_is_a_first_one_and_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caches: list[list[str] | None] = []

    def processes(environment: Mapping[str, str]) -> Any:
        cache = environment.get("XDG_CACHE_HOME")
        caches.append(None if cache is None else os.listdir(cache))
        child = SimpleNamespace(wait_ready=lambda _deadline: None)
        return nullcontext(SimpleNamespace(start=lambda *_words: child))

    monkeypatch.setattr(start, "Processes", processes)
    monkeypatch.setattr(start, "model_s", lambda: tmp_path)
    monkeypatch.setattr(start, "start_chains", lambda *_asked: [SimpleNamespace(address="/address")])
    monkeypatch.setattr(start, "_first_token", lambda *_asked: 1.0)
    start.run(3)
    assert caches == [[], None, None, None, None]  # an empty cache once; the last starts serve the clients
    said = capsys.readouterr().out
    assert "first start on this machine" in said
    assert "server start to ready" in said
