"""Requests to token ids: messages through the model's own chat template, tools and all. On the prompt thread."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from jinja2 import TemplateError

from corolla.apps.gateway.errors import ApiError, bad_request
from corolla.apps.gateway.grammar import ANY_OBJECT, GrammarMaker
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.sampling import Sampling
from corolla.apps.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Tool,
    one_prompt,
    stops_of,
)
from corolla.apps.gateway.toolcalls import MAX_CALLS, ToolFormat, describe_tools, forced_schema, format_of, untaught
from corolla.apps.gateway.writing import Wanted

LOOKED_AT_CHARS: Final = 16
"""For each token of the context, of a text that is longer: languages have two to five, and code seldom ten."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, ready to be written."""

    wanted: Wanted
    form: ToolFormat | None = None
    """How calls are found in the answer; None: there are none to find."""
    tools: Sequence[Tool] = ()
    """Those that it may call."""
    is_forced_call: bool = False
    """The whole answer is one call's JSON."""
    max_calls: int = MAX_CALLS
    echo: str = ""


class PromptMaker:
    """Prepares requests for one model. For one thread at a time."""

    def __init__(self, model: GatewayModel, *, default_new_tokens: int) -> None:
        self._model = model
        self._default_new_tokens = default_new_tokens
        self._grammars = GrammarMaker(model)

    def chat(self, request: ChatRequest, context_tokens: int) -> Prepared:
        """Raises ApiError 400."""
        if self._model.chat_template is None:
            raise bad_request(
                f"{self._model.name} has no chat template; use /v1/completions", "model", "no_chat_template"
            )
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs is only for requests with logprobs", "top_logprobs", "invalid_value")
        tools = [] if request.tool_choice == "none" else request.tools or []
        form = format_of(self._model.chat_template) if tools else None
        prompt = self._encode(
            self._render(request, tools), special=False, context_tokens=context_tokens, param="messages"
        )
        schema, param, opening = self._schema(request, tools, form)
        if opening:
            prompt += self._tokens(opening, special=False)
        wanted = self._wanted(
            request, prompt, context_tokens,
            limit=request.max_completion_tokens or request.max_tokens,
            limit_name="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )  # fmt: skip
        grammar = None if schema is None else self._grammars.compile(schema, param)
        is_forced_call = bool(opening) or param == "tools"
        max_calls = 1 if request.parallel_tool_calls is False else MAX_CALLS
        wanted = replace(wanted, grammar=grammar, keeps_special=form is not None)
        return Prepared(wanted, form, tools, is_forced_call, max_calls)

    def completion(self, request: CompletionRequest, context_tokens: int) -> Prepared:
        """Raises ApiError 400."""
        if request.suffix:
            raise bad_request("suffix is not possible with these models", "suffix", "unsupported")
        if request.best_of not in (None, request.n or 1):
            raise bad_request("best_of is only possible as n", "best_of", "unsupported")
        if request.echo and request.logprobs is not None:
            raise bad_request("echo with logprobs is not possible: prompts are not scored", "echo", "unsupported")
        given = one_prompt(request)
        if isinstance(given, str):
            prompt, echo = self._encode(given, special=True, context_tokens=context_tokens, param="prompt"), given
        else:
            prompt, echo = self._checked_ids(given), ""
            if request.echo:
                echo = cast("str", cast("Any", self._model.prompt_tokenizer).decode(given))
        wanted = self._wanted(
            request, prompt, context_tokens,
            limit=request.max_tokens or 16, limit_name="max_tokens", top_logprobs=request.logprobs,
        )  # fmt: skip
        return Prepared(wanted, echo=echo if request.echo else "")

    # --- parts

    def _wanted(
        self, request: ChatRequest | CompletionRequest, prompt: list[int], context_tokens: int, *,
        limit: int | None, limit_name: str, top_logprobs: int | None,
    ) -> Wanted:  # fmt: skip
        left = context_tokens - len(prompt)
        if not prompt:
            raise bad_request("the prompt has no tokens", "prompt", "invalid_value")
        if left < (limit or 1):
            raise ApiError(
                400,
                f"this model's maximum context length is {context_tokens} tokens; the prompt has {len(prompt)} and "
                f"the answer may take {limit or 1}",
                "context_length_exceeded",
                limit_name if left >= 1 else ("messages" if isinstance(request, ChatRequest) else "prompt"),
            )
        return Wanted(
            prompt=prompt,
            max_new_tokens=limit or min(left, self._default_new_tokens),
            num_choices=request.n or 1,
            sampling=self._sampling(request, top_logprobs),
            stops=stops_of(request.stop),
        )

    def _sampling(self, request: ChatRequest | CompletionRequest, top_logprobs: int | None) -> Sampling:
        defaults = self._model.defaults
        return Sampling(
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=defaults.top_k,
            seed=request.seed,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            bias=self._bias(request.logit_bias or {}),
            top_logprobs=top_logprobs,
        )

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for text, value in given.items():
            token = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
            if not 0 <= token < self._model.half.vocabulary:
                raise bad_request(
                    f"logit_bias: {text[:32]!r} is no token id of this model", "logit_bias", "invalid_value"
                )
            bias[token] = value
        return bias

    def _schema(
        self, request: ChatRequest, tools: Sequence[Tool], form: ToolFormat | None
    ) -> tuple[dict[str, Any] | None, str, str]:
        """What the answer must be, the parameter that says so, and how it begins."""
        choice = request.tool_choice
        if choice == "required" or isinstance(choice, NamedTool):
            name = choice.function.name if isinstance(choice, NamedTool) else None
            schema = forced_schema(tools, name)
            if schema is None or form is None:
                said = "no tools are given" if name is None else f"there is no tool named {name}"
                raise bad_request(f"tool_choice: {said}", "tool_choice", "invalid_value")
            return schema, "tools", f"{form.opening}\n" if form.closing else ""
        asked = request.response_format
        if asked is None or asked.type == "text":
            return None, "", ""
        if asked.type == "json_object":
            return ANY_OBJECT, "response_format", ""
        if asked.json_schema is None or asked.json_schema.schema is None:
            raise bad_request(
                "response_format: json_schema needs its schema", "response_format.json_schema", "invalid_value"
            )
        return asked.json_schema.schema, "response_format.json_schema.schema", ""

    def _render(self, request: ChatRequest, tools: Sequence[Tool]) -> str:
        assert self._model.chat_template is not None
        messages = [_with_text(message, number) for number, message in enumerate(request.messages)]
        knows_tools = format_of(self._model.chat_template).knows_tools
        if not knows_tools:
            messages = untaught(messages, tools)
        names = _called_names(messages)
        return self._guarded(
            lambda: cast("Any", self._model.prompt_tokenizer).apply_chat_template(
                [_for_template(message, names) for message in messages],
                tools=describe_tools(tools) if tools and knows_tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def _encode(self, text: str, *, special: bool, context_tokens: int, param: str) -> list[int]:
        """Raises ApiError 400 for a text that is far too long, by its beginning: 4 MB take ten seconds, for which
        everybody else's prompts would wait."""
        beginning = text[: context_tokens * LOOKED_AT_CHARS]
        tokens = self._tokens(beginning, special=special)
        if len(beginning) == len(text):
            return tokens
        if len(tokens) > context_tokens:
            raise bad_request(
                f"this model's maximum context length is {context_tokens} tokens; of the prompt's {len(text)} "
                f"characters the first {len(beginning)} are {len(tokens)} already",
                param, "context_length_exceeded",
            )  # fmt: skip
        return self._tokens(text, special=special)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        return cast("list[int]", self._model.prompt_tokenizer(text, add_special_tokens=special)["input_ids"])

    def _checked_ids(self, tokens: list[int]) -> list[int]:
        wrong = next((token for token in tokens if not 0 <= token < self._model.half.vocabulary), None)
        if wrong is not None:
            raise bad_request(f"prompt: {wrong} is no token id of this model", "prompt", "invalid_value")
        return tokens

    def _guarded(self, render: Callable[[], str]) -> str:
        """A template refuses what its model was not taught (two users in a row, say), each in its own way."""
        try:
            return render()
        except (TemplateError, TypeError, ValueError, KeyError) as wrong:
            raise bad_request(
                f"messages: this model's chat template does not take them: {str(wrong)[:200]}", "messages",
                "invalid_value",
            ) from None  # fmt: skip


def _with_text(message: Message, number: int) -> Message:
    """The message with its content as one text."""
    where = f"messages[{number}]"
    if message.content is None and not message.tool_calls:
        raise bad_request(f"{where}.content: a message needs content", f"{where}.content", "invalid_value")
    if not isinstance(message.content, list):
        return message
    texts: list[str] = []
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise bad_request(
                f"{where}.content[{place}]: these models read text only, no {part.type[:32]!r}",
                f"{where}.content[{place}].type", "invalid_value",
            )  # fmt: skip
        texts.append(part.text)
    return Message(message.role, "\n".join(texts), message.name, message.tool_calls, message.tool_call_id)


def _called_names(conversation: Sequence[Message]) -> dict[str, str]:
    """Which function each call was of, by the call's id; of two under one id the first."""
    calls = [call for message in conversation for call in message.tool_calls or []]
    return {call.id: call.function.name for call in reversed(calls)}


def _for_template(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    """As chat templates know messages. `names`: `_called_names` of the conversation."""
    entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    entry["content"] = message.content or ""
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        entry["tool_call_id"] = message.tool_call_id
        entry["name"] = message.name if message.tool_call_id is None else names.get(message.tool_call_id, message.name)
    return entry


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves; what is none stays the text it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
