"""Run the checks of `make check` and `make test`, each within a time budget, and sum them up.

    run_checks.py check    lint, formatting, types, import contracts, fast tests
    run_checks.py test     the same, then the slow and the long tests

The types and the long tests only compute. They run beside all the others, on what those leave of the processors, and
their output comes when those have ended.

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
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: the tools stand beside the venv's python, not the system's
HARD_LIMIT_FACTOR = 4
"""How many budgets a part may take before it is killed: a loaded machine is slow, a hang is not."""
LEAST_TESTS_LIMIT_S = 900
"""What tests may take at least: one that hangs ends by a limit of its own, long before."""
DRAIN_S = 2.0
"""A process that outlives its part may hold the pipe open; its output is not waited for longer than this."""
TAIL_BYTES = 8192
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""Nine processes read all tests, and what pytest makes of them (a third of their start) is kept for the next."""
NICENESS = 15
"""Of what runs beside the others: it takes what they leave, and a small share (3 %) where they leave nothing."""

OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


@dataclass(frozen=True, slots=True)
class Part:
    """One command with the seconds it should take on two cores."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    has_tests: bool = False
    runs_beside: bool = False
    """Beside all other parts, on what they leave of the processors: for parts that no clock but their limit sees."""
    least_limit_s: float = 0.0
    """It is not killed before that, whatever its budget."""

    @property
    def limit_s(self) -> float:
        return max(self.budget_s * HARD_LIMIT_FACTOR, self.least_limit_s)


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


def pytest_part(name: str, marker: str, budget_s: float, *, share: str, runs_beside: bool = False) -> Part:
    """`share`: how the workers divide the tests: "worksteal" evenly, "loadfile" a file to one, with its fixtures."""
    command = (sys.executable, "-m", "pytest", "-m", marker, "--durations=5", "--durations-min=2")
    limits = (f"--timeout={budget_s * HARD_LIMIT_FACTOR:.0f}",) if runs_beside else ()
    words = (*command, "-n", WORKERS, "--dist", share, *limits)
    return Part(name, words, budget_s, True, runs_beside, LEAST_TESTS_LIMIT_S)


CHECK = (
    Part("lint", tool("ruff", "check", "."), 5),
    Part("formatting", tool("ruff", "format", "--check", "."), 5),
    Part("types", tool("basedpyright"), 300, runs_beside=True),
    Part("import contracts", tool("lint-imports", "--no-logo", "--no-cache"), 15),
    pytest_part("fast tests", "not slow and not full", 120, share="worksteal"),
)
TEST = (
    *CHECK,
    pytest_part("slow tests", "slow and not full", 900, share="loadfile"),
    pytest_part("long tests", "full", 1150, share="loadfile", runs_beside=True),
)

WHOLE_BUDGETS_S = {"check": 120.0, "test": 1110.0}
"""From the first part to the last. Beside others a part takes longer than alone, so that their budgets add up to more;
an install on a fresh machine takes another minute and a half."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "test"])
    what = parser.parse_args().what
    started = time.monotonic()
    outcomes = run_all(CHECK if what == "check" else TEST)
    whole_s = time.monotonic() - started
    say(table(outcomes))
    for outcome in outcomes:
        if outcome.is_over_budget:
            say(
                f"!!! {outcome.part.name} took {outcome.seconds:.0f} s, its budget is {outcome.part.budget_s:.0f} s !!!"
            )
    if whole_s > WHOLE_BUDGETS_S[what]:
        say(f"!!! all of it took {whole_s:.0f} s, its budget is {WHOLE_BUDGETS_S[what]:.0f} s !!!")
    say(closing_line(outcomes, whole_s))
    return int(any(outcome.failed for outcome in outcomes))


def run_all(parts: Sequence[Part]) -> list[Outcome]:
    """Run the parts one after another, and those that run beside others beside them; outcomes in the parts' order."""
    beside = {part.name: Beside(part) for part in parts if part.runs_beside}
    try:
        others = {part.name: run(part) for part in parts if not part.runs_beside}
        return [beside[part.name].finish() if part.runs_beside else others[part.name] for part in parts]
    finally:
        for one in beside.values():
            one.end()


def run(part: Part) -> Outcome:
    """Run one part, showing its output as it comes; its whole process group ends with it."""
    say(heading(part))
    started = time.monotonic()
    process = start(part, subprocess.PIPE)
    try:
        tail = show_output(process, deadline=started + part.limit_s)
        timed_out = process.poll() is None
    finally:
        kill_group(process)
    return told(Outcome(part, time.monotonic() - started, process.returncode, timed_out), tail)


class Beside:
    """A part that runs beside the others from now on. A thread waits for its end, and ends it at its limit."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._started = time.monotonic()
        self._seconds = 0.0
        self._timed_out = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = start(part, self._output)
        give_way(self._process.pid)
        self._waiting = threading.Thread(target=self._wait)
        self._waiting.start()

    def finish(self) -> Outcome:
        """Wait for its end, at its limit at the latest, then show its output."""
        if self._waiting.is_alive():
            say(f"\n--- waiting for {self._part.name}")
        self._waiting.join()
        say(heading(self._part))
        self._output.seek(0)
        output = self._output.read()
        sys.stdout.buffer.write(output)
        outcome = Outcome(self._part, self._seconds, self._process.returncode, self._timed_out)
        return told(outcome, output[-TAIL_BYTES:].decode(errors="replace"))

    def end(self) -> None:
        """End it if it has not ended, as after an interrupt."""
        if self._waiting.is_alive():
            kill_group(self._process)
        self._waiting.join()
        self._output.close()

    def _wait(self) -> None:
        try:
            self._process.wait(timeout=self._part.limit_s)
        except subprocess.TimeoutExpired:
            self._timed_out = True
        finally:
            self._seconds = time.monotonic() - self._started
            kill_group(self._process)


def start(part: Part, output: int | IO[Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the commands above, no shell
        part.command,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def give_way(leader: int) -> None:
    """Let a new session have the processors only where others leave them."""
    os.setpriority(os.PRIO_PGRP, leader, NICENESS)
    with contextlib.suppress(OSError):  # Linux weighs sessions against each other first, where it groups by them at all
        Path(f"/proc/{leader}/autogroup").write_text(str(NICENESS))


def heading(part: Part) -> str:
    return f"\n--- {part.name} (budget {part.budget_s:.0f} s): {' '.join(part.command)}"


def told(outcome: Outcome, tail: str) -> Outcome:
    """The outcome with its tests counted, and said."""
    if outcome.part.has_tests:
        outcome = replace(outcome, tests=count_tests(tail))
    say(f"--- {outcome.part.name}: {outcome.result} after {outcome.seconds:.1f} s")
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, too, it ends what it has started
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
