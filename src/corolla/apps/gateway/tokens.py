"""What a single token says: for log probabilities."""

from functools import lru_cache
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

_MAX_NAMES = 65536


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write every byte as a printable character (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(hidden)}


class TokenNames:
    """Text and bytes of single tokens. For one thread at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = cast("Any", tokenizer)
        self._alphabet = _byte_alphabet()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self.bytes = lru_cache(_MAX_NAMES)(self._bytes)

    def text(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        if self._is_byte_level:
            name = cast("str | None", self._tokenizer.convert_ids_to_tokens(token)) or ""
            if all(char in self._alphabet for char in name):
                return bytes(self._alphabet[char] for char in name)
        return cast("str", self._tokenizer.decode([token])).encode()
