"""Speed is measured once for each model, device and format, remembered, and corrected by real work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from corolla.ids import Fingerprint
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.span import Span
from corolla.models.testing import write_tiny
from corolla.server import speed
from corolla.server.meter import SpeedMeter

KEY = speed.SpeedKey(Fingerprint("ab" * 16), "cpu", torch.float32, 2)


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> Span:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, "llama")
    return load_span(open_checkpoint(directory), 0, 2)


def test_a_speed_is_measured_once_and_remembered(span: Span, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache" / "speeds.json"
    first = speed.remembered_speed(span, KEY, file)
    assert all(0 < rate < 1e9 for rate in first)
    monkeypatch.setattr(speed, "measure_speed", lambda _span: (1.0, 2.0))
    assert speed.remembered_speed(span, KEY, file) == first
    assert speed.remembered_speed(span, replace(KEY, num_blocks=3), file) == (1.0, 2.0)
    [key, _] = json.loads(file.read_text())
    assert key.startswith(f"{KEY.model} cpu of ")
    assert key.endswith(" float32 2")


def test_what_real_work_says_is_remembered_in_place_of_a_measurement(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    other = replace(KEY, quantization="int8")
    speed.remember_speed(KEY, (1.0, 2.0), file)
    speed.remember_speed(other, (5.0, 6.0), file)
    speed.remember_speed(KEY, (3.0, 4.0), file)
    assert speed.recall_speed(KEY, file) == (3.0, 4.0)
    assert [key.endswith("int8 2") for key in json.loads(file.read_text())] == [True, False]
    assert speed.recall_speed(replace(KEY, device="cpu", dtype=torch.bfloat16), file) is None


@pytest.mark.parametrize("junk", ["", "[]", "{", '{"a": "b"}', '{"a": [1.0]}', '{"a": [-1.0, 2.0]}'])
def test_a_damaged_file_costs_a_measurement_only(
    span: Span, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: str
) -> None:
    file = tmp_path / "speeds.json"
    file.write_text(junk)
    monkeypatch.setattr(speed, "measure_speed", lambda _span: (1.0, 2.0))
    assert speed.remembered_speed(span, KEY, file) == (1.0, 2.0)
    assert list(json.loads(file.read_text()).values()) == [[1.0, 2.0]]


def test_the_file_stays_small(span: Span, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps({f"key {number}": [1.0, 1.0] for number in range(1000)}))
    monkeypatch.setattr(speed, "measure_speed", lambda _span: (1.0, 2.0))
    speed.remembered_speed(span, KEY, file)
    assert len(json.loads(file.read_text())) == speed.MAX_REMEMBERED


def test_where_nothing_can_be_written_it_is_measured_each_time(span: Span, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert speed.remembered_speed(span, KEY, tmp_path / "file" / "speeds.json")[0] > 0


def test_real_work_moves_the_mean_step_by_step() -> None:
    meter = SpeedMeter(10, decode_tokens_per_s=100.0, prefill_tokens_per_s=0.0)
    meter.saw_step(new_tokens=1, rows=1, num_blocks=10, compute_s=0.02)
    assert meter.decode_tokens_per_s == pytest.approx(97.5)
    for _ in range(200):
        meter.saw_step(new_tokens=1, rows=4, num_blocks=5, compute_s=0.01)
    assert meter.decode_tokens_per_s == pytest.approx(50.0, rel=0.01)
    meter.saw_step(new_tokens=4, rows=2, num_blocks=10, compute_s=1.0)
    assert meter.prefill_tokens_per_s == 0.0
    meter.saw_step(new_tokens=32, rows=2, num_blocks=10, compute_s=0.5)
    assert meter.prefill_tokens_per_s == pytest.approx(128.0)
    meter.saw_step(new_tokens=1, rows=1, num_blocks=10, compute_s=0.0)
    assert meter.decode_tokens_per_s == pytest.approx(50.0, rel=0.01)
