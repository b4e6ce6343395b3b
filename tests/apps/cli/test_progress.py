"""What takes long says so on standard error, and standard output stays the result's."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from corolla.apps.bench.setup import in_rounds
from corolla.apps.cli import bootstrap, progress, status
from corolla.apps.cli.progress import progress_until_text
from corolla.errors import SwarmError
from corolla.models.transfer import Transfer

LONG_S = 30.0
"""No test waits for it, unless it fails."""


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is shown now, by the commands whose `progress` is replaced."""
    shown: list[str] = []

    @contextmanager
    def noted(what: str) -> Generator[None]:
        shown.append(what)
        yield
        shown.remove(what)

    for module in (bootstrap, progress, status):
        monkeypatch.setattr(module, "progress", noted)
    return shown


def test_elsewhere_than_on_a_terminal_it_is_one_line_and_what_lasts_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.progress("loading") as shown:
        assert capsys.readouterr().err == "loading …\n"
        shown.say("it is large")
        shown.progress(Transfer("a file", 1, 2, 0.5))
        shown.progress(Transfer("a file", 1_000_000, 2_000_000, 4.0))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "it is large\na file: 1.0 of 2.0 MB, 4 s, about 4 s left\n"


def test_on_a_terminal_it_stands_while_it_lasts_and_then_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress("loading"):
        pass
    said = capsys.readouterr()
    assert said.out == ""
    assert "loading …" in said.err
    assert said.err.endswith("\x1b[2K"), "the line is taken away again"


def test_a_long_wait_for_the_first_text_is_shown_until_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    is_shown, told = threading.Event(), list[str]()

    @contextmanager
    def noted(what: str) -> Generator[None]:
        told.append(f"+ {what}")
        is_shown.set()
        yield
        told.append("-")

    monkeypatch.setattr(progress, "progress", noted)
    with progress_until_text("reading", told.append, after_s=0.0) as write:
        assert is_shown.wait(LONG_S)
        write("")
        assert told == ["+ reading", ""]
        write("word")
        write("word")
    assert told == ["+ reading", "", "-", "word", "word"]


@pytest.mark.parametrize("texts", [["word"], []])
def test_a_short_wait_for_the_first_text_is_not_shown(doing: list[str], texts: list[str]) -> None:
    told: list[str] = []
    before = threading.enumerate()
    with progress_until_text("reading", told.append, after_s=LONG_S) as write:
        for text in texts:
            write(text)
        [timer] = [thread for thread in threading.enumerate() if thread not in before]
    timer.join(LONG_S / 2)
    assert (told, doing, timer.is_alive()) == (texts, [], False)


class FakeTransport:
    """Joins, and notes what was shown then; then it is lost."""

    def __init__(self, doing: list[str]) -> None:
        self.peer, self.addresses = "peer", ["/ip4/127.0.0.1/tcp/1/p2p/peer"]
        self.shown_at_join: list[str] = []
        self._doing = doing

    async def __aenter__(self) -> "FakeTransport":
        return self

    async def __aexit__(self, *_error: object) -> None: ...

    async def join(self, _peers: object, *, timeout_s: float) -> None:
        assert timeout_s > 2
        self.shown_at_join += self._doing

    async def wait_lost(self) -> str:
        return "that is all"


@pytest.fixture
def transport(doing: list[str], monkeypatch: pytest.MonkeyPatch) -> FakeTransport:
    fake = FakeTransport(doing)
    monkeypatch.setattr("corolla.net.libp2p.transport.open_transport", lambda _network: fake)
    return fake


def test_a_bootstrap_peer_that_joins_says_so_and_standard_output_has_its_one_line(
    transport: FakeTransport, doing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SwarmError, match="that is all"):
        bootstrap.command.main(["--join", "/ip4/127.0.0.1/tcp/2/p2p/other"], standalone_mode=False)
    assert transport.shown_at_join == ["joining the swarm"]
    assert doing == []
    assert capsys.readouterr().out == "ready peer=peer addr=/ip4/127.0.0.1/tcp/1/p2p/peer\n"


def test_a_watched_swarm_is_asked_visibly_for_the_first_time(
    transport: FakeTransport, doing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    async def read(_transport: object, _wanted: object, **_how: object) -> list[object]:
        seen.append(doing.copy())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return []

    async def pause(_seconds: float) -> None: ...

    monkeypatch.setattr("corolla.apps.status.reading.read_swarm", read)
    monkeypatch.setattr(status.asyncio, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        status.command.callback(  # pyright: ignore[reportOptionalCall]
            models=(), watch=True, every=5.0, exit_code=False, join=("/a",), as_json=True
        )
    assert transport.shown_at_join == ["asking the swarm"]
    assert seen == [["asking the swarm"], []]


def test_a_benchmark_says_which_round_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for number in in_rounds(range(1, 3)):
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"round {number} of 2 …\n")
