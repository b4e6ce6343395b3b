"""The check runner: a failed, hanging or empty part is seen, and the rest runs all the same."""

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "run_checks.py"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_checks", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_checks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("3 passed in 0.12s", {"passed": 3}),
        ("==== 1 failed, 2 passed, 1 skipped in 3.00s ====", {"failed": 1, "passed": 2, "skipped": 1}),
        ("2 errors in 0.5s", {"error": 2}),
        ("no tests ran in 0.01s", {}),
        ("7 passed, 3 deselected in 61.20s (0:01:01)", {"passed": 7}),
    ],
)
def test_pytests_closing_line_is_counted(checks: ModuleType, line: str, counts: dict[str, int]) -> None:
    assert checks.count_tests(f"a test said: 5 passed things\n{line}\n") == Counter(counts)


def test_a_part_passes_when_its_command_does(checks: ModuleType) -> None:
    outcome = checks.run(checks.Part("x", python("print('hello')"), 20))
    assert (outcome.failed, outcome.exit_code, outcome.result) == (False, 0, "ok")


def test_the_output_is_shown(checks: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    checks.run(checks.Part("x", python("print('hello', 1 + 1)"), 20))
    assert "hello 2" in capfd.readouterr().out


def test_no_tests_at_all_is_a_failure(checks: ModuleType) -> None:
    outcome = checks.run(checks.Part("x", python("print('no tests ran in 0.01s'); raise SystemExit(5)"), 20, True))
    assert outcome.failed
    assert checks.closing_line([outcome], 1.5) == "==== 0 passed, 1 error in 1.50s ===="


def test_a_hanging_part_is_ended_with_its_children(checks: ModuleType, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    beat.touch()
    child = f"import time\nwhile True: open({str(beat)!r}, 'w').write(str(time.time())); time.sleep(0.02)"
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = checks.run(checks.Part("x", python(hang), 0.5))
    assert outcome.timed_out
    assert outcome.failed
    last = beat.read_text()
    time.sleep(0.2)
    assert beat.read_text() == last


def test_a_process_that_outlives_its_part_does_not_hold_it_up(checks: ModuleType) -> None:
    leave_child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    outcome = checks.run(checks.Part("x", python(leave_child), 20))
    assert not outcome.failed
    assert outcome.seconds < 20


def test_a_part_over_its_budget_is_named_but_passes(checks: ModuleType) -> None:
    outcome = checks.run(checks.Part("x", python("import time; time.sleep(0.3)"), 0.25))
    assert outcome.result == "ok, OVER BUDGET"
    assert not outcome.failed


def test_a_part_runs_beside_the_others_and_gives_way_to_them(
    checks: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the two waits for the other, so one after another they would never end."""
    here, there = tmp_path / "here", tmp_path / "there"

    def meet(mine: Path, theirs: Path) -> str:
        wait = f"while not pathlib.Path({str(theirs)!r}).exists(): time.sleep(0.02)"
        return f"import os, pathlib, time\npathlib.Path({str(mine)!r}).touch()\n{wait}\n"

    nice = "print(os.getpriority(os.PRIO_PROCESS, 0), 'passed in 1s')"
    parts = [
        checks.Part("beside", python(meet(here, there) + nice), 60, True, runs_beside=True),
        checks.Part("other", python(meet(there, here) + nice), 60, True),
    ]
    beside, other = checks.run_all(parts)
    assert (beside.part.name, beside.failed, other.part.name, other.failed) == ("beside", False, "other", False)
    assert beside.tests["passed"] == checks.NICENESS > other.tests["passed"], "whatever we run under ourselves"
    assert f"{checks.NICENESS} passed in 1s" in capfd.readouterr().out


def test_a_part_beside_the_others_ends_at_its_limit(checks: ModuleType) -> None:
    [outcome] = checks.run_all([checks.Part("beside", python("import time; time.sleep(600)"), 0.5, runs_beside=True)])
    assert outcome.result == "TIMED OUT"


def test_what_runs_beside_ends_when_the_run_is_broken_off(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = checks.start
    monkeypatch.setattr(checks, "start", lambda *given: started.append(start(*given)) or started[-1])

    def broken_off(part: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run", broken_off)
    beside = checks.Part("beside", python("import time; time.sleep(600)"), 600, runs_beside=True)
    with pytest.raises(KeyboardInterrupt):
        checks.run_all([beside, checks.Part("other", (), 1)])
    assert started[0].returncode is not None


def test_the_closing_line_sums_all_parts(checks: ModuleType) -> None:
    lint = checks.Outcome(checks.Part("lint", (), 1), 1, 1)
    fast = checks.Outcome(checks.Part("fast", (), 1, True), 1, 0, tests=Counter(passed=40))
    slow = checks.Outcome(checks.Part("slow", (), 1, True), 1, 1, tests=Counter(passed=2, failed=1, skipped=3))
    line = checks.closing_line([lint, fast, slow], 61.2)
    assert line == "==== 1 failed, 42 passed, 3 skipped, 1 error in 61.20s ===="
    assert checks.count_tests(line) == Counter(failed=1, passed=42, skipped=3, error=1)
