"""`corolla chat`: what the user types decides what happens."""

import os
import signal
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from corolla.apps.cli import chat
from corolla.apps.cli.chat import stop_on_interrupt, talk
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
