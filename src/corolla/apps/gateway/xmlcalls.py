"""Calls as Qwen3-Coder writes them: tags around bare text, whose type only the tool's schema can tell.

    <tool_call>
    <function=look>
    <parameter=at>
    the door
    </parameter>
    </function>
    </tool_call>

The outer tags are sometimes left out. A call that is cut off, or has anything else within it, is none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from corolla.apps.gateway.schema import Tool

OPENING: Final = "<function="
_FUNCTION: Final = re.compile(r"<function=([^>\n]{1,64})>(.*?)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]{1,64})>(.*?)</parameter>", re.DOTALL)
_OUTER: Final = re.compile(r"\s*</?tool_call>\s*")
_WORDS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
"""As Python writes them, which models of code do too."""


def xml_calls_in(text: str, tools: Sequence[Tool]) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """(name, arguments) of each call, and what is no call: all of it, as it was, if there is none."""
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    calls: list[tuple[str, dict[str, Any]]] = []

    def take(found: re.Match[str]) -> str:
        name, body = found[1].strip(), found[2]
        if _PARAMETER.sub("", body).strip():
            return found[0]
        arguments = {key.strip(): _value(schemas.get(name, {}), key.strip(), said) for key, said in _parameters(body)}
        calls.append((name, arguments))
        return ""

    left = _FUNCTION.sub(take, text)
    return calls, _OUTER.sub("", left) if calls else text


def _parameters(body: str) -> list[tuple[str, str]]:
    return cast("list[tuple[str, str]]", _PARAMETER.findall(body))


def _value(schema: Mapping[str, Any], name: str, said: str) -> Any:
    """What the text is by the tool's schema; what does not fit it stays text, for whoever called to see."""
    text = said.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties")
    types = _types(properties.get(name)) if isinstance(properties, dict) else set[str]()
    if text.strip() in ("null", "None") and "null" in types:
        return None
    if not types or "string" in types:
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _types(schema: object) -> set[str]:
    """All that a schema's `type` or its alternatives name, one deep."""
    if not isinstance(schema, dict):
        return set()
    known = cast("dict[str, Any]", schema)
    alternatives = [one for key in ("anyOf", "oneOf") for one in known.get(key) or () if isinstance(one, dict)]
    said = [known.get("type"), *(cast("dict[str, Any]", one).get("type") for one in alternatives)]
    return {name for one in said for name in (one if isinstance(one, list) else [one]) if isinstance(name, str)}
