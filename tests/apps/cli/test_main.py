"""The frame: fast help, typed errors as sentences and exit codes, tracebacks only on demand."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest

from corolla.apps.cli import main as frame
from corolla.errors import BadInput, CacheFull, MissingBlocks, NoPeers, SwarmError

HEAVY = ("numpy", "torch", "hivemind", "transformers", "grpc", "uvloop")
HELP_LIMIT_S = 0.3

FrameRun = Callable[[click.Command | Exception], int]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrameRun]:
    """Run `corolla status`, which is the given command, or one that raises the given error."""

    def run(what: click.Command | BaseException) -> int:
        def fail() -> None:
            raise what

        command = what if isinstance(what, click.Command) else click.Command("status", callback=fail)
        monkeypatch.setattr(frame, "load_command", lambda _name: command)
        return frame.run(["status"])

    return run


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in frame.COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run_python(
        f"import sys; from corolla.apps.cli.main import run; code = run({arguments!r});"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_help_takes_under_a_third_of_a_second_of_processor_time() -> None:
    """Not of the clock: a busy machine makes everybody wait."""
    seconds: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "corolla", "--help"], capture_output=True, timeout=30, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < HELP_LIMIT_S


def test_the_list_of_commands_says_what_each_command_says_of_itself() -> None:
    for name, summary in frame.COMMANDS.items():
        command = frame.load_command(name)
        assert command.name == name
        assert (command.help or "").splitlines()[0] == summary


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SwarmError("it broke"), 1),
        (BadInput("no such model: /nowhere"), 2),
        (NoPeers("nobody answered at /ip4/127.0.0.1/tcp/1"), 3),
        (MissingBlocks([4, 5]), 4),
        (CacheFull("no room for 100 tokens", value="100", bound="64"), 6),
    ],
)
def test_our_errors_become_one_sentence_and_their_exit_code(
    run_command: FrameRun, capsys: pytest.CaptureFixture[str], error: SwarmError, code: int
) -> None:
    assert run_command(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"Error: {error}\n"


def test_our_error_is_found_inside_a_group_of_failed_tasks(
    run_command: FrameRun, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [NoPeers("nobody answered")])])
    assert run_command(group) == NoPeers.exit_code
    assert capsys.readouterr().err == "Error: nobody answered\n"


def test_a_bug_asks_to_be_reported_without_a_traceback(
    run_command: FrameRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(KeyError("surprise")) == 1
    err = capsys.readouterr().err
    assert "KeyError: 'surprise'" in err
    assert "report it" in err
    assert "Traceback" not in err


def test_a_bug_shows_its_traceback_under_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from corolla.apps.cli.options import logging_options

    def fail() -> None:
        raise KeyError("surprise")

    command = click.command("status")(logging_options("warning")(fail))
    monkeypatch.setattr(frame, "load_command", lambda _name: command)
    assert frame.run(["status", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_said_in_words(run_command: FrameRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(OSError(28, "No space left on device", "/cache/model")) == 1
    assert capsys.readouterr().err == "Error: no space left on the disk for /cache/model\n"


def test_ctrl_c_is_quiet(run_command: FrameRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(KeyboardInterrupt()) == frame.INTERRUPTED  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().err.strip() == ""


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["srve"]) == 2
    assert "No such command 'srve'" in capsys.readouterr().err
