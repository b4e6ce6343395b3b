"""Run the checks of `make check` and `make test`, each within a time budget, and sum them up.

    run_checks.py check    lint, formatting, types, import contracts, fast tests
    run_checks.py test     the same, then the slow and the long tests

A part that takes longer than its budget is loudly named but does not fail; one that reaches its hard limit is
killed and fails. A failed part does not stop the ones after it. The closing line counts tests the way pytest
does; a part that failed without a failed test (lint, types, a hang, no tests found) counts as one error.
"""

import argparse
import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: the tools stand beside the venv's python, not the system's
HARD_LIMIT_FACTOR = 3
"""How many budgets a part may take before it is killed: a loaded machine is slow, a hang is not."""
DRAIN_S = 2.0
"""A process that outlives its part may hold the pipe open; its output is not waited for longer than this."""
TAIL_BYTES = 8192

OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


@dataclass(frozen=True, slots=True)
class Part:
    """One command with the seconds it should take on two cores."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    has_tests: bool = False

    @property
    def limit_s(self) -> float:
        return self.budget_s * HARD_LIMIT_FACTOR


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part."""

    part: Part
    seconds: float
    exit_code: int
    timed_out: bool = False
    tests: Counter[str] = field(default_factory=Counter[str])

    @property
    def failed(self) -> bool:
        return self.timed_out or self.exit_code != 0

    @property
    def is_over_budget(self) -> bool:
        return self.seconds > self.part.budget_s

    @property
    def result(self) -> str:
        if self.timed_out:
            return "TIMED OUT"
        if self.failed:
            return f"FAILED (exit {self.exit_code})"
        return "ok, OVER BUDGET" if self.is_over_budget else "ok"


def tool(name: str, *args: str) -> tuple[str, ...]:
    return (str(BIN / name), *args)


WORKERS = "2"
"""Test processes at a time: one of ours mostly waits for the processes that it has started."""


def pytest_part(name: str, marker: str, budget_s: float, *, share: str) -> Part:
    """`share`: how the workers divide the tests: "worksteal" evenly, "loadfile" a file to one, with its fixtures."""
    command = (sys.executable, "-m", "pytest", "-m", marker, "--durations=5", "--durations-min=2")
    return Part(name, (*command, "-n", WORKERS, "--dist", share), budget_s, has_tests=True)


CHECK = (
    Part("lint", tool("ruff", "check", "."), 5),
    Part("formatting", tool("ruff", "format", "--check", "."), 5),
    Part("types", tool("basedpyright"), 45),
    Part("import contracts", tool("lint-imports", "--no-logo", "--no-cache"), 15),
    pytest_part("fast tests", "not slow and not full", 90, share="worksteal"),
)
TEST = (
    *CHECK,
    pytest_part("slow tests", "slow and not full", 660, share="loadfile"),
    pytest_part("long tests", "full", 400, share="worksteal"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "test"])
    parts = CHECK if parser.parse_args().what == "check" else TEST
    started = time.monotonic()
    outcomes = [run(part) for part in parts]
    say(table(outcomes))
    for outcome in outcomes:
        if outcome.is_over_budget:
            say(
                f"!!! {outcome.part.name} took {outcome.seconds:.0f} s, its budget is {outcome.part.budget_s:.0f} s !!!"
            )
    say(closing_line(outcomes, time.monotonic() - started))
    return int(any(outcome.failed for outcome in outcomes))


def run(part: Part) -> Outcome:
    """Run one part, showing its output as it comes; its whole process group ends with it."""
    say(f"\n--- {part.name} (budget {part.budget_s:.0f} s): {' '.join(part.command)}")
    started = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - the commands above, no shell
        part.command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        tail = show_output(process, deadline=started + part.limit_s)
        timed_out = process.poll() is None
    finally:
        kill_group(process)
    seconds = time.monotonic() - started
    tests = count_tests(tail) if part.has_tests else Counter[str]()
    outcome = Outcome(part, seconds, process.returncode, timed_out, tests)
    say(f"--- {part.name}: {outcome.result} after {seconds:.1f} s")
    return outcome


def show_output(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Copy the output to ours until the process ends or `deadline` passes; the last few KB of it."""
    assert process.stdout is not None
    tail = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (now := time.monotonic()) < deadline:
            if process.poll() is not None:
                deadline = min(deadline, now + DRAIN_S)
            if not selector.select(timeout=min(0.5, deadline - now)):
                continue
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                break
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            tail = (tail + data)[-TAIL_BYTES:]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=max(0.0, min(DRAIN_S, deadline - time.monotonic())))
    return tail.decode(errors="replace")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the part's processes: after a time-out, an interrupt, or because a test leaked one."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except (ProcessLookupError, PermissionError):  # nobody left; macOS answers EPERM for a group of zombies
            break
        if process.poll() is None:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def count_tests(output: str) -> Counter[str]:
    """The counts on pytest's closing line: the last line of the output that has any."""
    for line in reversed(output.splitlines()):
        found = OUTCOME.findall(line)
        if found and " in " in line:
            return Counter({kind.removesuffix("s") if kind == "errors" else kind: int(n) for n, kind in found})
    return Counter()


def closing_line(outcomes: list[Outcome], seconds: float) -> str:
    """Like pytest's own, over all parts: `==== 1 failed, 41 passed, 1 error in 61.2s ====`."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total += outcome.tests
        if outcome.failed and not outcome.tests["failed"] and not outcome.tests["error"]:
            total["error"] += 1
    words = [f"{total['failed']} failed"] if total["failed"] else []
    words.append(f"{total['passed']} passed")
    words += [f"{total[kind]} {kind}" for kind in ("skipped", "xfailed", "xpassed") if total[kind]]
    if total["error"]:
        words.append(f"{total['error']} error{'s' if total['error'] > 1 else ''}")
    return f"==== {', '.join(words)} in {seconds:.2f}s ===="


def table(outcomes: list[Outcome]) -> str:
    lines = ["", f"{'part':<18}{'seconds':>9}{'budget':>9}  result", "-" * 60]
    lines += [
        f"{o.part.name:<18}{o.seconds:>9.1f}{o.part.budget_s:>9.0f}  {o.result}"
        + (f"  ({', '.join(f'{n} {kind}' for kind, n in o.tests.items())})" if o.tests else "")
        for o in outcomes
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
