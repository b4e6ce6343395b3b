"""`corolla chat`: what the user types decides what happens."""

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from corolla.apps.cli import chat, conversation
from corolla.apps.cli.chat import stop_on_interrupt, talk
from corolla.apps.cli.main import run
from corolla.errors import BadInput


@dataclass
class FakeConversation:
    """Answers every question with its echo; `is_full`: refuses instead."""

    is_full: bool = False
    questions: list[str] = field(default_factory=list[str])

    def ask(self, question: str, write: Any, *, should_stop: Any) -> None:
        self.questions.append(question)
        if self.is_full:
            raise BadInput("the session was opened for 10 tokens")
        write(f"echo {question}")


def talk_with(conversation: FakeConversation, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    typed = iter(lines)
    monkeypatch.setattr(chat, "_read_line", lambda: next(typed, None))
    return talk(cast("Any", conversation))


def test_questions_are_asked_until_the_end_of_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = FakeConversation()
    assert not talk_with(conversation, ["one", "", "two"], monkeypatch)
    assert conversation.questions == ["one", "two"]
    assert capsys.readouterr().out == "echo one\necho two\n"


def test_exit_ends_and_new_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = FakeConversation()
    assert not talk_with(conversation, ["/exit", "never"], monkeypatch)
    assert talk_with(conversation, ["/new", "never"], monkeypatch)
    assert conversation.questions == []


def test_a_full_conversation_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not talk_with(FakeConversation(is_full=True), ["one"], monkeypatch)
    assert "/new begins a new conversation" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_twice_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        assert "Ctrl-C again ends" in capfd.readouterr().err, "it says so at once: the step may wait for long"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_bytes_that_are_no_text_do_not_end_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _prompt: b"w5 \xff ".decode(errors="surrogateescape"))
    assert chat._read_line() == "w5 ?"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Puts this model in the place of the swarm's; returns what was asked for."""

    def replace(swarm_model: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def open_model(model: str, peers: Sequence[str], *, dtype: str | None, **_more: Any) -> Any:
            asked.append((model, *peers, dtype))
            return swarm_model

        monkeypatch.setattr(conversation, "open_model", open_model)
        return asked

    return replace


def test_the_command_joins_says_who_can_read_along_and_holds_the_conversation(
    opened: Callable[..., Any], canned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    swarm_model = canned([10, 11], [12], [13])
    asked = opened(swarm_model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7\nw8\n/new\nw9\n/exit\nnever\n"))
    assert run(["chat", "MODEL", "--join", "A", "--join", "B", "--temperature", "0.5", "--max-new-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert asked == [("MODEL", "A", "B", None)]
    assert out.split() == ["w10", "w11", "w12", "w13"]
    assert err.count("servers of a swarm can read what passes through them") == 1
    assert swarm_model.model.opened == [64, 64]  # as long as the model may; `/new` begins another
    arguments = swarm_model.model.arguments
    assert (arguments["max_new_tokens"], arguments["do_sample"], arguments["temperature"]) == (9, True, 0.5)


def test_an_answer_is_written_as_it_comes(
    opened: Callable[..., Any], canned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown: list[str] = []
    with (tmp_path / "out").open("w", buffering=1 << 20) as out:  # what is not flushed is not shown
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stdin", io.StringIO("w7\n"))
        swarm_model = canned([10, 11, 12])
        swarm_model.model.after_each_token = lambda: shown.append((tmp_path / "out").read_text())
        opened(swarm_model)
        assert run(["chat", "MODEL", "--join", "A", "--max-context", "32"]) == 0
    assert [text.split() for text in shown[1:3]] == [["w10"], ["w10", "w11"]]  # whole when the next one begins
    assert swarm_model.model.opened == [32]


def test_a_model_without_a_chat_template_is_sent_to_generate(
    opened: Callable[..., Any], canned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    swarm_model = canned()
    monkeypatch.setattr(swarm_model.tokenizer, "chat_template", None)
    opened(swarm_model)
    assert run(["chat", "MODEL", "--join", "A"]) == 2
    assert "MODEL has no chat template; use `corolla generate --raw`" in capsys.readouterr().err
