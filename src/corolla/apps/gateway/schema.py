"""What requests may say, with the bounds of every field; `read` turns bytes into one, or into a 400 with its name.

Fields that OpenAI knows and that mean nothing here (`user`, `store` …) are taken and ignored; those that would change
the answer and cannot be honoured are refused; unknown ones are refused too, as OpenAI does: a misspelt
`max_completion_token` must not pass in silence. Messages may hold more than is known: clients send back what they got.
"""

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from corolla.apps.gateway.errors import ApiError, bad_request

MAX_MESSAGES: Final = 4096
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_CHOICES: Final = 16
MAX_TOP_LOGPROBS: Final = 20

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Object = dict[str, Any]


class Function(Struct):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.\-]+$")]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    name: Name


class NamedTool(Struct):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Struct):
    name: Name
    arguments: str
    """JSON, as text."""


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Part(Struct):
    """Of a message's content."""

    type: str
    text: str | None = None


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class JsonSchema(Struct):
    name: Name = "answer"
    schema: Object | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request have."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Stops = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Bias, Meta(max_length=1024)] | None = None
    user: str | None = None


class ChatRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    # known to OpenAI, without a meaning here
    metadata: Object | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Object | None = None


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: Any
    """A `Prompt`; checked by `one_prompt`: no type says "a list of the one or of the other"."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None


Request = TypeVar("Request", ChatRequest, CompletionRequest)

_AT: Final = re.compile(r"^(.*?)(?: - at `\$?\.?(.*?)`)?$", re.DOTALL)
_QUOTED: Final = re.compile(r"(?:unknown field|required field) `([^`]*)`")
MAX_QUOTED_CHARS: Final = 64


def read(body: bytes, kind: type[Request]) -> Request:
    """The request in `body`. Raises ApiError 400 with the parameter's name."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as wrong:
        raise _wrong_field(str(wrong)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise bad_request(f"the body is not JSON: {wrong}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _wrong_field(text: str) -> ApiError:
    """`Expected `int`, got `str` - at `$.messages[0].role`` as an error that names the field."""
    matched = _AT.match(text)
    problem, where = (matched[1], matched[2] or "") if matched else (text, "")
    quoted = _QUOTED.search(problem)
    if quoted:
        field = quoted[1]
        short = field if len(field) <= MAX_QUOTED_CHARS else f"{field[:MAX_QUOTED_CHARS]}…"
        problem = problem.replace(field, short)
        where = ".".join(part for part in (where, short) if part)
    return bad_request(f"{where or 'the body'}: {problem[0].lower()}{problem[1:]}", where or None, "invalid_value")


def one_prompt(request: CompletionRequest) -> str | list[int]:
    """The prompt of a completion; one at a time. Raises ApiError."""
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise bad_request("prompt must be one text, or one list of token ids", "prompt", "invalid_value")


def stops_of(stop: Stops) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
