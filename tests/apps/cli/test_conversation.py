"""Conversations: each turn sends only what the servers do not hold, also after an answer was stopped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.apps.cli.conversation import Conversation, Sampling, SwarmModel, common_length, load_tokenizer
from corolla.apps.cli.generate import _checked
from corolla.errors import BadInput

EOS = 2


@pytest.mark.parametrize(
    ("known", "prompt", "length"),
    [
        ([], [5, 6], 0),
        ([5, 6], [5, 6, 7], 2),
        ([5, 6, 7], [5, 8, 7], 1),
        ([5, 6, 7], [5, 6, 7], 2),
        ([5, 6, 7, 8], [5, 6], 1),
    ],
)
def test_the_common_beginning_leaves_at_least_one_token_to_send(
    known: list[int], prompt: list[int], length: int
) -> None:
    assert common_length(known, prompt) == length


@dataclass
class FakeSession:
    """What a conversation touches of a session."""

    position: int = 0
    output_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None


@dataclass
class FakeModel:
    """Answers with the given tokens; like the real one, holds all of them but the last."""

    answers: list[list[int]]
    sent: list[list[int]] = field(default_factory=list[list[int]])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def generate(self, inputs: torch.Tensor, *, session: FakeSession, streamer: Any, **arguments: Any) -> None:
        before = 0 if session.output_ids is None else session.output_ids.shape[1]
        assert session.position <= before
        self.sent.append(inputs[0].tolist())
        self.arguments = arguments
        streamer.put(inputs)
        for number, token in enumerate(self.answers.pop(0)):
            session.position = before + inputs.shape[1] + number
            streamer.put(torch.tensor([token]))
            if arguments["stopping_criteria"](inputs, torch.zeros(1, 1)).all():
                break
        streamer.end()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


def conversation_with(model: FakeModel, tokenizer: Any, sampling: Sampling | None = None) -> Conversation:
    return Conversation(SwarmModel(model, tokenizer), FakeSession(), sampling or Sampling())  # pyright: ignore


def ids(tokenizer: Any, text: str) -> Sequence[int]:
    return tokenizer(text)["input_ids"]


def test_the_answer_streams_without_markers(tokenizer: Any) -> None:
    parts: list[str] = []
    pace = conversation_with(FakeModel([[10, 11, EOS]]), tokenizer).ask("w7", parts.append)
    assert "".join(parts).split() == ["w10", "w11"]
    assert len(pace.token_times) == 3
    assert pace.first_token_s is not None


def test_a_second_turn_sends_only_what_is_new(tokenizer: Any) -> None:
    model = FakeModel([[10, 11, EOS], [12, EOS]])
    conversation = conversation_with(model, tokenizer)
    conversation.ask("w7", lambda _part: None)
    conversation.ask("w8 w9", lambda _part: None)
    assert model.sent[0] == ids(tokenizer, "user w7 eos assistant")
    assert model.sent[1] == ids(tokenizer, "user w8 w9 eos assistant")


def test_a_template_that_rewrites_the_past_is_sent_from_where_it_differs(tokenizer: Any) -> None:
    model = FakeModel([[10, 11, EOS], [12, EOS]])
    conversation = conversation_with(model, tokenizer)
    conversation.ask("w7", lambda _part: None)
    conversation.messages[1]["content"] = "w99"
    conversation.ask("w8", lambda _part: None)
    assert model.sent[1] == ids(tokenizer, "w99 eos user w8 eos assistant")


def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_came(tokenizer: Any) -> None:
    model = FakeModel([[10, 11, 12, 13], [14, EOS]])
    conversation = conversation_with(model, tokenizer)
    conversation.ask("w7", lambda _part: None, should_stop=iter([False, True]).__next__)
    assert conversation.messages[1]["content"].split() == ["w10", "w11"]
    conversation.ask("w8", lambda _part: None)
    assert model.sent[1] == ids(tokenizer, "eos user w8 eos assistant")


def test_greedy_is_the_default_and_a_temperature_samples(tokenizer: Any) -> None:
    model = FakeModel([[EOS], [EOS]])
    conversation_with(model, tokenizer).ask("w7", lambda _part: None)
    assert model.arguments["do_sample"] is False
    assert "temperature" not in model.arguments
    conversation_with(model, tokenizer, Sampling(temperature=0.5, seed=1)).ask("w7", lambda _part: None)
    assert (model.arguments["do_sample"], model.arguments["temperature"]) == (True, 0.5)


def test_a_seed_without_sampling_is_refused() -> None:
    with pytest.raises(BadInput, match="--temperature or --top-p"):
        Sampling(seed=1)


def test_a_temperature_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadInput, match="nan"):
        Sampling(temperature=float("nan"))


def test_an_empty_prompt_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match="empty"):
        conversation_with(FakeModel([]), tokenizer).complete([], lambda _part: None)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadInput, match="UTF-8: see its character 4"):
        _checked(b"w5 \xff".decode(errors="surrogateescape"))
    assert _checked("日本語 🦀") == "日本語 🦀"


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadInput, match=str(tmp_path)):
        load_tokenizer(tmp_path)
