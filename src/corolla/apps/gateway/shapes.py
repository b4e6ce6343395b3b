"""From pieces to what the caller gets: chunks as they come, or the whole in the end; of chats and of completions."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from corolla.apps.gateway.generation import Answer
from corolla.apps.gateway.prompts import Prepared
from corolla.apps.gateway.responses import (
    Json,
    calls_json,
    chat_logprobs,
    completion_logprobs,
    head,
    route_note,
    usage,
)
from corolla.apps.gateway.schema import ToolCall
from corolla.apps.gateway.tokens import TokenNames
from corolla.apps.gateway.toolcalls import ToolReader, parse_calls
from corolla.apps.gateway.writing import Piece

CHAT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"
TEXT: Final = "text_completion"


class Shape(Protocol):
    """How one answer is told."""

    def chunks(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        """Of a stream; the last one has the note of the route."""
        ...

    def add(self, pieces: Sequence[Piece]) -> None:
        """Of an answer that is told as a whole."""
        ...

    def whole(self) -> Json: ...


@dataclass(slots=True)
class _Shown:
    """What one piece adds to one choice."""

    text: str
    calls: list[ToolCall]
    finish: str | None


class _ChatChoice:
    """Finds the calls in one choice."""

    def __init__(self, prepared: Prepared) -> None:
        self._is_call = prepared.is_forced_call
        self._reader = None if prepared.form is None or self._is_call else ToolReader(prepared.form, prepared.tools)
        self._max_calls = prepared.max_calls
        self._call = ""
        self.text: list[str] = []
        self.calls: list[ToolCall] = []
        self.pieces: list[Piece] = []
        self.finish: str | None = None

    def push(self, piece: Piece) -> _Shown:
        shown = self._read(piece)
        if shown.calls and shown.finish == "stop":
            shown.finish = "tool_calls"
        return shown

    def add(self, piece: Piece) -> None:
        shown = self.push(piece)
        self.text.append(shown.text)
        self.calls += shown.calls
        self.finish = shown.finish
        self.pieces.append(piece)

    def _read(self, piece: Piece) -> _Shown:
        if self._is_call:
            self._call += piece.text
            calls = parse_calls(self._call) if piece.finish else []
            return _Shown(self._call if piece.finish and not calls else "", calls, piece.finish)
        if self._reader is None:
            return _Shown(piece.text, [], piece.finish)
        text = self._reader.push(piece.text)
        if piece.finish is None:
            return _Shown(text, [], None)
        rest, calls = self._reader.finish()
        return _Shown(text + rest, calls[: self._max_calls], piece.finish)


@dataclass(slots=True)
class _Common:
    answer: Answer
    prepared: Prepared
    names: TokenNames
    has_usage: bool
    """The stream's last chunk tells the usage."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.unfinished = self.answer.wanted.num_choices

    def last_chunk(self, kind: str, chunk: Json) -> Iterator[Json]:
        """`chunk` ended the last choice: the note goes with it, or with the usage after it."""
        if not self.has_usage:
            yield chunk | {"corolla": route_note(self.answer)}
            return
        yield chunk
        yield {
            **head(kind, self.id, self.answer, self.created), "choices": [], "usage": usage(self.answer),
            "corolla": route_note(self.answer),
        }  # fmt: skip

    def told(self, kind: str, chunk: Json, finish: str | None) -> Iterator[Json]:
        self.unfinished -= finish is not None
        if self.has_usage:
            chunk["usage"] = None
        if self.unfinished:
            yield chunk
        else:
            yield from self.last_chunk(kind, chunk)


class ChatShape(_Common):
    """`chat.completion` and its chunks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._choices = [_ChatChoice(self.prepared) for _ in range(self.answer.wanted.num_choices)]
        self._has_begun = False

    def chunks(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        if not self._has_begun:
            self._has_begun = True
            for number in range(len(self._choices)):
                yield self._chunk(number, {"role": "assistant", "content": ""}, None, None)
        for piece in pieces:
            shown = self._choices[piece.choice].push(piece)
            logprobs = chat_logprobs([piece], self.names)
            delta: Json = {"content": shown.text} if shown.text else {}
            if shown.calls:
                delta["tool_calls"] = calls_json(shown.calls, indexed=True)
            if shown.finish is not None and delta:
                yield self._chunk(piece.choice, delta, None, logprobs)
                delta, logprobs = {}, None
            if delta or logprobs or shown.finish:
                yield from self.told(CHUNK, self._chunk(piece.choice, delta, shown.finish, logprobs), shown.finish)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._choices[piece.choice].add(piece)

    def whole(self) -> Json:
        return {
            **head(CHAT, self.id, self.answer, self.created),
            "choices": [self._choice(number, choice) for number, choice in enumerate(self._choices)],
            "usage": usage(self.answer),
            "corolla": route_note(self.answer),
        }

    def _chunk(self, number: int, delta: Json, finish: str | None, logprobs: Json | None) -> Json:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {**head(CHUNK, self.id, self.answer, self.created), "choices": [choice]}
        return chunk | ({"usage": None} if self.has_usage else {})

    def _choice(self, number: int, choice: _ChatChoice) -> Json:
        text = "".join(choice.text)
        message: Json = {"role": "assistant", "content": text or (None if choice.calls else ""), "refusal": None}
        if choice.calls:
            message["tool_calls"] = calls_json(choice.calls)
        logprobs = chat_logprobs(choice.pieces, self.names)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


class CompletionShape(_Common):
    """`text_completion`, whose chunks look like the whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = f"cmpl-{secrets.token_hex(12)}"
        count = self.answer.wanted.num_choices
        self._pieces: list[list[Piece]] = [[] for _ in range(count)]
        self._offsets = [len(self.prepared.echo)] * count
        self._to_echo = set(range(count)) if self.prepared.echo else set[int]()

    def chunks(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        for piece in pieces:
            text = piece.text
            logprobs = completion_logprobs([piece], self.names, self._offsets[piece.choice])
            self._offsets[piece.choice] += len(text)
            if piece.choice in self._to_echo:
                self._to_echo.discard(piece.choice)
                text = self.prepared.echo + text
            if text or logprobs or piece.finish:
                choice = _text_choice(piece.choice, text, logprobs, piece.finish)
                chunk = {**head(TEXT, self.id, self.answer, self.created), "choices": [choice]}
                yield from self.told(TEXT, chunk, piece.finish)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._pieces[piece.choice].append(piece)

    def whole(self) -> Json:
        return {
            **head(TEXT, self.id, self.answer, self.created),
            "choices": [
                _text_choice(
                    number,
                    self.prepared.echo + "".join(piece.text for piece in pieces),
                    completion_logprobs(pieces, self.names, len(self.prepared.echo)),
                    pieces[-1].finish,
                )
                for number, pieces in enumerate(self._pieces)
            ],
            "usage": usage(self.answer),
            "corolla": route_note(self.answer),
        }


def _text_choice(number: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}
