"""`make latest` says what came out otherwise, and fails when a family that was right is not any more."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from corolla.models.survey import Row

PATH = Path(__file__).parents[2] / "tools" / "latest.py"


@pytest.fixture(scope="module")
def latest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("latest", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(family, outcome, remark=""):
    return Row(family, outcome, "everywhere" if outcome == "right" else "", "", remark)


BEFORE = {"llama": row("llama", "right"), "rwkv": row("rwkv", "refused", "no")}


def test_the_same_again_is_well(latest, capsys):
    assert latest.report(BEFORE, dict(BEFORE)) == 0
    assert capsys.readouterr().out == "1 of 2 families are right; 0 came out otherwise than families.md says\n"


@pytest.mark.parametrize(
    ("after", "code", "line"),
    [
        (
            [row("llama", "wrong", "differs by 1e-01"), BEFORE["rwkv"]],
            1,
            "llama: right (cut everywhere) -> wrong (differs by 1e-01)",
        ),
        ([BEFORE["llama"], row("rwkv", "right")], 0, "rwkv: refused (no) -> right (cut everywhere)"),
        ([*BEFORE.values(), row("newest", "refused", "no list")], 0, "newest: not there -> refused (no list)"),
        ([BEFORE["llama"]], 0, "rwkv: refused (no) -> not there"),
    ],
    ids=["worse", "better", "new", "gone"],
)
def test_a_change_is_one_line_and_fails_only_when_something_right_is_lost(after, code, line, latest, capsys):
    assert latest.report(BEFORE, {found.family: found for found in after}) == code
    assert f"  {line}\n" in capsys.readouterr().out


def fake_python(tmp_path, code):
    """An interpreter that runs `code` whatever it is asked to run."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    return script


def test_rows_are_read_as_they_come(tmp_path, latest):
    lines = [json.dumps(asdict(found)) for found in BEFORE.values()]
    python = fake_python(tmp_path, f"print({lines[0]!r}); print({lines[1]!r})")
    assert list(latest.survey(python)) == list(BEFORE.values())


def test_a_survey_that_dies_is_not_taken_for_a_short_one(tmp_path, latest):
    python = fake_python(tmp_path, f"print({json.dumps(asdict(BEFORE['llama']))!r}); raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with code 3"):
        list(latest.survey(python))


def test_a_survey_that_takes_too_long_is_compared_as_far_as_it_came_and_fails(tmp_path, latest, capsys, monkeypatch):
    monkeypatch.setattr(latest, "SURVEY_TIMEOUT_S", 0)
    python = fake_python(
        tmp_path, f"print({json.dumps(asdict(row('llama', 'wrong', 'differs')))!r}, flush=True); input()"
    )
    assert latest.compare(BEFORE, latest.survey(python)) == 1
    said = capsys.readouterr().out
    assert "stopped at llama: the survey took more than 0 s; of those 1 families:" in said
    assert "  llama: right (cut everywhere) -> wrong (differs)\n" in said
    assert "rwkv" not in said
