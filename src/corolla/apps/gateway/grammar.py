"""Answers that must be JSON: which tokens may come next, by llguidance.

A grammar is compiled once for a request (on the prompt thread: a large schema takes a while) and copied for each of
its choices. White space between values is not left to the model: small ones go on with it for ever.
"""

import json
from collections.abc import Callable
from typing import Any, Final, cast

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from corolla.apps.gateway.errors import bad_request
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.sampling import Grammar

MAX_SCHEMA_CHARS: Final = 1 << 16
ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


class JsonGrammar:
    """The state of one choice."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> Tensor:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(bits).bool()

    def took(self, token: int) -> None:
        self._matcher.consume_token(token)


class GrammarMaker:
    """Compiles schemas for one model. For one thread at a time."""

    def __init__(self, model: GatewayModel) -> None:
        self._model = model
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, schema: dict[str, Any], param: str) -> Callable[[], Grammar]:
        """Makes grammars for this JSON schema. Raises ApiError 400, naming `param`, for one that cannot be held to."""
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            raise bad_request(
                f"{param}: a schema of {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken", param,
                "invalid_schema",
            )  # fmt: skip
        tokenizer = self._tokenizer = self._tokenizer or self._read_tokenizer()
        options = cast("Any", {"whitespace_flexible": False})
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
        except ValueError as wrong:
            raise bad_request(f"{param}: {wrong}", param, "invalid_schema") from None
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise bad_request(f"{param}: {matcher.get_error()[:400]}", param, "invalid_schema")
        vocabulary = self._model.half.vocabulary
        return lambda: JsonGrammar(matcher.deep_copy(), vocabulary)

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        tokenizer = cast("Any", self._model.prompt_tokenizer)
        try:
            return llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=self._model.half.vocabulary, eos_token=sorted(self._model.end_tokens)
            )
        except (ValueError, TypeError) as wrong:
            raise bad_request(
                f"this model's tokenizer cannot be held to a grammar: {wrong}", "response_format", "unsupported"
            ) from None
