"""Tools, as families of models were taught to be told of them and to call them.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>     Qwen, Hermes, SmolLM and many others
    xml       the same tags around <function=NAME><parameter=KEY> …    Qwen3-Coder (`xmlcalls.py`)
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    llama     {"name": …, "parameters": {…}} as the whole answer       Llama 3

A model whose chat template knows no tools is told of them in a system message, in the first way. What cannot be read
as a call stays text: a caller sees what the model wrote.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from corolla.apps.gateway import xmlcalls
from corolla.apps.gateway.schema import CalledFunction, Message, Tool, ToolCall
from corolla.apps.gateway.text import StopFinder

MAX_CALLS: Final = 64
PYTHON_TAG: Final = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes a call."""

    opening: str
    closing: str | None
    """None: all that follows the opening is calls."""
    knows_tools: bool = True
    """False: the template says nothing of tools, so we do."""
    is_xml: bool = False
    """Within the marks, or without them, calls are `xmlcalls.py`'s; JSON is taken too, since a forced call is JSON."""


HERMES: Final = ToolFormat("<tool_call>", "</tool_call>")
XML: Final = ToolFormat("<tool_call>", "</tool_call>", is_xml=True)
UNTAUGHT: Final = ToolFormat("<tool_call>", "</tool_call>", knows_tools=False)
MISTRAL: Final = ToolFormat("[TOOL_CALLS]", None)
LLAMA: Final = ToolFormat("{", None)


def format_of(template: str) -> ToolFormat:
    """The way of the model whose chat template this is."""
    if "tools" not in template:
        return UNTAUGHT
    if MISTRAL.opening in template:
        return MISTRAL
    if HERMES.opening in template:
        return XML if xmlcalls.OPENING in template else HERMES
    return LLAMA if '"parameters"' in template or PYTHON_TAG in template else HERMES


class ToolReader:
    """Parts one choice's text into what is shown and what is called, as it comes."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool] = ()) -> None:
        self._form = form
        self._tools = tools
        self._before = StopFinder([form.opening, xmlcalls.OPENING] if form.is_xml else [form.opening])
        self._seen = ""
        self._all = ""

    def push(self, text: str) -> str:
        """What may be shown of it now."""
        self._all += text
        if self._form is LLAMA:  # its calls have no mark: an answer that begins as JSON may be one
            start = self._all.removeprefix(PYTHON_TAG).lstrip()
            return "" if not start or start[0] == "{" or PYTHON_TAG.startswith(self._all) else self._show_all()
        shown = self._before.push(text)
        self._seen += shown
        return shown

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text, and the calls."""
        if self._form is not LLAMA:
            self._seen += (rest := self._before.finish())
            if not self._before.has_stopped:
                return rest, []
        else:
            rest = ""
        calling = self._all[len(self._seen) :]
        if self._form.is_xml:
            said, text = xmlcalls.xml_calls_in(calling, self._tools)
            if said:
                return rest + text, [_made(name, arguments) for name, arguments in said[:MAX_CALLS]]
        calls, text = _calls_in(calling, self._form)
        return rest + text, calls

    def _show_all(self) -> str:
        shown, self._seen = self._all[len(self._seen) :], self._all
        return shown


def parse_calls(payload: str) -> list[ToolCall]:
    """The calls in a JSON object or list; empty when it is none. Raises nothing."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        return []
    entries: list[Any] = said if isinstance(said, list) else [said]
    calls = [_call(entry) for entry in entries[:MAX_CALLS]]
    return [call for call in calls if call is not None] if calls and None not in calls else []


def _call(entry: Any) -> ToolCall | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    return _made(entry["name"], arguments)


def _made(name: str, arguments: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", CalledFunction(name, text))


def _calls_in(text: str, form: ToolFormat) -> tuple[list[ToolCall], str]:
    """The calls of a text that begins with an opening, and what is no call."""
    if form is LLAMA:
        calls = parse_calls(text.removeprefix(PYTHON_TAG).strip())
        return calls, "" if calls else text
    if form.closing is None:
        calls = parse_calls(text.removeprefix(form.opening).strip())
        return calls, "" if calls else text
    calls, left = list[ToolCall](), ""
    while form.opening in text:
        before, _, rest = text.partition(form.opening)
        payload, _, after = rest.partition(form.closing)
        found = parse_calls(payload.strip())
        calls += found
        left += before if found else text[: len(text) - len(after)]
        text = after
    left += text
    if calls:
        left = left.strip()  # the line ends between calls are nothing to show
    return calls[:MAX_CALLS], left


# --- telling the model


def describe_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As templates want them: OpenAI's own form."""
    return [msgspec.to_builtins(tool) for tool in tools]


def instructions(tools: Sequence[Tool]) -> str:
    """For a model whose template says nothing of tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in describe_tools(tools))
    return (
        "You may call functions. Their signatures are within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>'
    )


def call_as_text(call: ToolCall) -> str:
    """A call of an earlier answer, for a template that knows none."""
    name, arguments = json.dumps(call.function.name), call.function.arguments
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def untaught(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with tools, calls and results as plain text, for a template that knows none of them."""
    told: list[Message] = []
    for message in messages:
        if message.tool_calls:
            text = "\n".join([_text(message), *map(call_as_text, message.tool_calls)]).strip()
            told.append(Message("assistant", text))
        elif message.role == "tool":
            told.append(Message("user", f"<tool_response>\n{_text(message)}\n</tool_response>"))
        else:
            told.append(message)
    if not tools:
        return told
    if told[0].role in ("system", "developer"):
        return [Message("system", f"{_text(told[0])}\n\n{instructions(tools)}"), *told[1:]]
    return [Message("system", instructions(tools)), *told]


def _text(message: Message) -> str:
    assert not isinstance(message.content, list), "made one text before"
    return message.content or ""


def forced_schema(tools: Sequence[Tool], name: str | None) -> dict[str, Any] | None:
    """What a call must look like, as a JSON schema; of this tool, or of any. None: there is no such tool."""
    chosen = [tool for tool in tools if name is None or tool.function.name == name]
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in chosen
    ]
    if not kinds:
        return None
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
