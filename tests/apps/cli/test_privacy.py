"""Every command that sends text through a swarm says once, and not on standard output, that servers can read it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from corolla.apps.cli import chat, conversation
from corolla.apps.cli import main as frame
from corolla.apps.cli.privacy import PRIVACY_NOTE
from corolla.apps.gateway import serving

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWpeer"


class FakeModel:
    """What the two commands touch of a model; answers nothing."""

    has_chat_template = True
    max_positions = 64

    @property
    def model(self) -> "FakeModel":
        return self

    def encode_chat(self, _messages: object) -> list[int]:
        return [1, 2]

    @contextmanager
    def inference_session(self, *, max_length: int) -> Generator[object]:
        yield max_length


class FakeConversation:
    def __init__(self, *_: object) -> None: ...

    def complete(self, _tokens: Sequence[int], write: Any) -> None:
        write("word")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No swarm, no model, no input."""

    async def run_gateway(*_: object, **_options: object) -> None: ...

    monkeypatch.setattr(conversation, "open_model", lambda *_, **_options: FakeModel())
    monkeypatch.setattr(conversation, "Conversation", FakeConversation)
    monkeypatch.setattr(chat, "_read_line", lambda: None)
    monkeypatch.setattr(serving, "run_gateway", run_gateway)


@pytest.mark.parametrize(
    ("words", "result"), [(["generate", "m", "hi"], "word\n"), (["chat", "m"], ""), (["gateway", "m"], "")]
)
def test_it_is_said_once_and_beside_the_result(
    words: list[str], result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run([*words, "--join", ADDRESS]) == 0
    said = capsys.readouterr()
    assert said.out == result
    assert said.err.count(PRIVACY_NOTE) == 1
