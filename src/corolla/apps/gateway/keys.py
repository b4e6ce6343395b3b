"""API keys: who may ask, and how much. Only hashes are kept; the keys have 256 random bits, so SHA-256 is enough.

A file has a line for each key, as `corolla key api` prints it; `#` begins a comment:

    alice sha256:9f86d081884c7d65… requests_per_minute=60 concurrent=4

The environment variable COROLLA_API_KEYS has keys themselves, with commas or spaces between them, without limits.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from corolla.errors import BadInput

KEYS_VARIABLE: Final = "COROLLA_API_KEYS"
PREFIX: Final = "sk-corolla-"
MAX_FILE_BYTES: Final = 1 << 20
LEAST_KEY_CHARS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Whom a request belongs to. `id` names the key in logs and traces and tells nothing of it."""

    id: str
    requests_per_minute: float | None = None
    concurrent: int | None = None


ANYONE: Final = ApiKey("")
"""Whoever asks a gateway without keys."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys, by hash. Empty: everybody may ask."""

    by_hash: dict[str, ApiKey] = field(default_factory=dict[str, ApiKey])

    def find(self, presented: str | None) -> ApiKey | None:
        """Whose key that is; None: nobody's. What is looked up is its hash: timing says nothing of the keys."""
        if not self.by_hash:
            return ANYONE
        return None if presented is None else self.by_hash.get(hash_key(presented))


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def line_for(name: str, key: str) -> str:
    """The line of a key file. Raises BadInput for a name that cannot stand there."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"{name!r} is no name for a key: letters, digits and ._@- only, 64 at most")
    return f"{name} sha256:{hash_key(key)}"


def load_keys(file: Path | None, environment: str = "") -> KeyRing:
    """The keys of the file and of the variable's text. Raises BadInput, never quoting a key."""
    ring: dict[str, ApiKey] = {}
    if file is not None:
        ring.update(_parsed(file, _read(file)))
        if not ring:
            raise BadInput(f"{file} has no key in it; `corolla key api NAME` makes one")
    for number, key in enumerate(environment.replace(",", " ").split(), 1):
        if len(key) < LEAST_KEY_CHARS:
            raise BadInput(f"key {number} of {KEYS_VARIABLE} is too short: {LEAST_KEY_CHARS} characters at least")
        ring[hash_key(key)] = ApiKey(f"environment-{number}")
    return KeyRing(ring)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise BadInput(f"{file} is too large for a file of keys")
        return file.read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise BadInput(f"cannot read the API keys in {file}: {fault}") from fault


def _parsed(file: Path, text: str) -> Iterable[tuple[str, ApiKey]]:
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{file}, line {number}"
        matched = _HASH.fullmatch(words[1]) if len(words) > 1 else None
        if matched is None or not _NAME.fullmatch(words[0]):
            raise BadInput(f"{where}: expected NAME sha256:HASH, as `corolla key api` prints it")
        if words[0] in names:
            raise BadInput(f"{where}: a second key named {words[0]}")
        names.add(words[0])
        yield matched[1], _limited(words[0], words[2:], where)


def _limited(name: str, words: Iterable[str], where: str) -> ApiKey:
    limits: dict[str, float] = {}
    for word in words:
        setting, _, value = word.partition("=")
        if setting not in ("requests_per_minute", "concurrent") or not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", value):
            raise BadInput(f"{where}: {word!r} is not requests_per_minute=N or concurrent=N")
        limits[setting] = float(value)
        if limits[setting] <= 0:
            raise BadInput(f"{where}: {setting} must be more than 0")
    concurrent = limits.get("concurrent")
    return ApiKey(name, limits.get("requests_per_minute"), None if concurrent is None else max(1, int(concurrent)))
