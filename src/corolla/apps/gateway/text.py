"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase

BROKEN: Final = "�"
"""What a decoder gives for bytes that are no character yet."""
MAX_BROKEN_TOKENS: Final = 8
"""A character has four bytes at most: text that stays broken for longer is given out as it is."""


class TextPieces:
    """The text of one choice, a piece for each token; joined, they are what `decode` makes of all tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keeps_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keeps_special = keeps_special
        self._tokens: list[int] = []
        self._given = 0
        """Tokens whose text has been given out."""
        self._context = 0
        """From here on tokens are decoded: some before the new ones, since a decoder looks at its neighbours."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        is_stuck = len(self._tokens) - self._given > MAX_BROKEN_TOKENS
        return self._take(is_last=is_stuck)

    def finish(self) -> str:
        """What is left, broken or not."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        before = self._decode(self._tokens[self._context : self._given])
        now = self._decode(self._tokens[self._context :])
        if now.endswith(BROKEN) and not is_last:
            return ""
        self._context, self._given = self._given, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return cast(
            "str", cast("Any", self._tokenizer).decode(list(tokens), skip_special_tokens=not self._keeps_special)
        )


class StopFinder:
    """Lets text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """What may be shown now."""
        if self.has_stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
