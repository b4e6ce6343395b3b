"""The description of `/v1/…` for programs, made of the very types that requests are read into."""

from typing import Any

import msgspec

from corolla import __version__
from corolla.apps.gateway.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "blocks": {"type": "array", "items": {"type": "integer"}},
            },
        }
    },
}
_MODEL: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "context_length": {"type": "integer"},
        "fingerprint": {"type": "string"},
    },
}
_MODELS: Json = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
    },
}
_ANSWER: Json = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage", "corolla"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["index", "finish_reason", "logprobs"],
                "properties": {"finish_reason": {"enum": ["stop", "length", "tool_calls"]}},
            },
        },
        "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
        "corolla": {"type": "object", "required": ["trace_id", "route", "tokens_per_s"]},
    },
}
_PROMPT: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": 1,
        },
    ]
}
_FAILURES = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No API key, or none of this gateway.",
    "404": "There is no such model.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body does not say that it is JSON.",
    "429": "Too many requests; `Retry-After` says when to come again.",
    "503": "The swarm cannot do it now; `blocks` lists what nobody serves.",
}


def describe() -> Json:
    """The OpenAPI 3.1 document."""
    _, components = msgspec.json.schema_components(
        (ChatRequest, CompletionRequest), ref_template="#/components/schemas/{name}"
    )
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    components |= {"Error": _ERROR, "Model": _MODEL, "Models": _MODELS, "Answer": _ANSWER}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "corolla gateway", "version": __version__},
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/models": {"get": _operation("The models.", "Models", failures=("401",))},
            "/v1/models/{name}": {
                "get": {**_operation("One model.", "Model", failures=("401", "404")), "parameters": [name]}
            },
            "/v1/chat/completions": {"post": _operation("Answer a conversation.", "Answer", "ChatRequest")},
            "/v1/completions": {"post": _operation("Continue a text.", "Answer", "CompletionRequest")},
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(summary: str, answer: str, request: str | None = None, failures: tuple[str, ...] = ()) -> Json:
    said: Json = {
        status: {"description": _FAILURES[status], "content": _content("Error")} for status in failures or _FAILURES
    }
    content = _content(answer)
    said["200"] = {"description": summary, "content": content}
    operation: Json = {"summary": summary, "responses": said}
    if request is not None:
        content["text/event-stream"] = {}
        operation["requestBody"] = {"required": True, "content": _content(request)}
    return operation


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
