"""Tokens chosen and made into text: whole characters, nothing of a stop string, no setting that ends in an error."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.apps.gateway.sampling import Sampler, Sampling
from corolla.apps.gateway.schema import Function, Message, Tool, ToolCall
from corolla.apps.gateway.text import StopFinder, TextPieces
from corolla.apps.gateway.toolcalls import (
    HERMES,
    LLAMA,
    MISTRAL,
    UNTAUGHT,
    XML,
    ToolFormat,
    ToolReader,
    format_of,
    untaught,
)

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0])


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-30, 1e-5, 0.01, 2.0])
@pytest.mark.parametrize("top_p", [5e-324, 1e-9, 0.5, 1.0])
def test_no_temperature_or_top_p_is_too_small(temperature: float, top_p: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, seed=1))
    picks = {sampler.pick(LOGITS).token for _ in range(50)}
    assert picks <= {0, 1, 2, 3}
    if temperature < 0.1 or top_p < 0.1:
        assert picks == {1}


def test_sampling_follows_the_probabilities_that_top_p_and_top_k_leave() -> None:
    sampler = Sampler(Sampling(top_p=0.9, seed=3))
    counts = torch.bincount(torch.tensor([sampler.pick(LOGITS).token for _ in range(4000)]), minlength=4) / 4000
    kept = LOGITS[[1, 3]].softmax(-1)  # 0.66 and 0.24 of all: the third is not needed for 0.9
    assert counts[[0, 2]].tolist() == [0.0, 0.0]
    assert torch.allclose(counts[[1, 3]], kept, atol=0.03)
    only = Sampler(Sampling(top_k=1, seed=3))
    assert {only.pick(LOGITS).token for _ in range(20)} == {1}


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=12), st.binary(max_size=6))
def test_pieces_of_text_join_to_the_whole_and_break_no_character(text: str, rubbish: bytes) -> None:
    pieces = TextPieces(Bytes())  # type: ignore[arg-type]
    tokens = [*text.encode(), *rubbish]
    said = [pieces.push(token) for token in tokens]
    assert "".join([*said, pieces.finish()]) == Bytes().decode(tokens, skip_special_tokens=True)
    if not rubbish:
        assert not any("�" in part for part in said) or "�" in text


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_text_is_shown_up_to_the_first_stop_however_it_is_cut(parts: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = "".join(finder.push(part) for part in parts)
    shown += "" if finder.has_stopped else finder.finish()
    whole = "".join(parts)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    if not ends:
        assert shown == whole
    else:  # the first stop to be complete ends the text, where it begins
        assert finder.has_stopped
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)


def read_calls(form: ToolFormat, text: str) -> tuple[str, list[ToolCall]]:
    """Whatever the pieces: read it a character at a time."""
    reader = ToolReader(form)
    shown = "".join(reader.push(char) for char in text)
    rest, calls = reader.finish()
    return shown + rest, calls


XML_CALL = "<function=look>\n<parameter=at>\nx\n</parameter>\n</function>"
NO_XML_CALL = "<function=look>at x</function>"
CALL = '{"name": "look", "arguments": {"at": "x"}}'


@pytest.mark.parametrize(
    ("form", "text", "shown", "num_calls"),
    [
        (HERMES, f"Well. <tool_call>\n{CALL}\n</tool_call>", "Well. ", 1),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", 2),
        (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
        (HERMES, f"<tool_call>{CALL}", "", 1),
        (HERMES, "a < b <tool", "a < b <tool", 0),
        (HERMES, "<tool_call>no json</tool_call> after", "<tool_call>no json</tool_call> after", 0),
        (HERMES, '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>', 0),
        (XML, f"Well.\n<tool_call>\n{XML_CALL}\n</tool_call>", "Well.\n", 1),
        (XML, f"<tool_call>\n{XML_CALL}\n</tool_call>\n<tool_call>\n{XML_CALL}\n</tool_call>", "", 2),
        (XML, f"So: {XML_CALL}\n</tool_call>", "So: ", 1),
        (XML, f"<tool_call>{CALL}</tool_call>", "", 1),
        (XML, f"<tool_call>\n{XML_CALL[:-3]}", f"<tool_call>\n{XML_CALL[:-3]}", 0),
        (XML, f"<tool_call>{NO_XML_CALL}</tool_call>", f"<tool_call>{NO_XML_CALL}</tool_call>", 0),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", 1),
        (MISTRAL, "[TOOL_CALLS] hm", "[TOOL_CALLS] hm", 0),
        (LLAMA, '{"name": "look", "parameters": {"at": "x"}}', "", 1),
        (LLAMA, f"<|python_tag|>{CALL}", "", 1),
        (LLAMA, "It is {fine}", "It is {fine}", 0),
        (LLAMA, '{"just": "json"}', '{"just": "json"}', 0),
    ],
)
def test_calls_are_found_as_families_write_them_and_all_else_stays_text(
    form: ToolFormat, text: str, shown: str, num_calls: int
) -> None:
    said, calls = read_calls(form, text)
    assert (said, len(calls)) == (shown, num_calls)
    for call in calls:
        assert call.function.name == "look"
        assert json.loads(call.function.arguments) == {"at": "x"}


@given(st.text('<tol_ca>{}[]":/, namergus', max_size=60))
def test_no_text_of_a_model_ends_the_reader_in_an_error(text: str) -> None:
    for form in (HERMES, XML, MISTRAL, LLAMA):
        shown, calls = read_calls(form, text)
        if not calls:
            assert shown == text


def test_bare_text_becomes_what_the_tools_schema_says_it_is() -> None:
    properties: dict[str, Any] = {
        "text": {"type": "string"}, "count": {"type": "integer"}, "is_deep": {"type": "boolean"},
        "places": {"type": "array"}, "depth": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "mode": {"type": ["string", "null"]}, "wrong": {"type": "integer"},
    }  # fmt: skip
    said = {
        "text": "\n\ndef f():\n    return 1\n", "count": "3", "is_deep": "True", "places": '["a", 2]', "depth": "null",
        "mode": "null", "wrong": "many", "unknown": "7",
    }  # fmt: skip
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    tool = Tool("function", Function("look", None, {"type": "object", "properties": properties}))
    reader = ToolReader(XML, [tool])
    assert reader.push(f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>") == ""
    _, [call] = reader.finish()
    assert json.loads(call.function.arguments) == {
        "text": said["text"], "count": 3, "is_deep": True, "places": ["a", 2], "depth": None,
        "mode": None, "wrong": "many", "unknown": "7",
    }  # fmt: skip


def test_the_way_of_a_family_is_read_off_its_template() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{% if tools %}<tool_call>\n<function=NAME>{% endif %}") is XML
    assert format_of("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert format_of('{% if tools %}{"name": "parameters"} "parameters"{% endif %}') is LLAMA
    assert format_of("{{ messages }}") is UNTAUGHT


def test_a_model_whose_template_knows_no_tools_is_told_of_them_in_the_system_message() -> None:
    tool = Tool("function", Function("look", "Look at it.", {"type": "object"}))
    told = untaught([Message("system", "be good"), Message("user", "hi")], [tool])
    assert [message.role for message in told] == ["system", "user"]
    assert isinstance(told[0].content, str)
    assert told[0].content.startswith("be good")
    assert '"name": "look"' in told[0].content
