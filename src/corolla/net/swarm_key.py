"""The key of a private swarm: 32 random bytes that its members share in a file, and proofs of knowing them.

A key proves membership and nothing else: what travels is encrypted by the transport, and who a peer is follows from
its identity. A proof is an HMAC-SHA256 over a domain and fields that each carry their length, so that no proof can
be taken for another. Several keys may be given at once, in any order: each is proven, and one that both sides have is
enough; so a swarm changes its key without a pause (`docs/private-swarms.md`).

Keys stay in memory and in their file: `repr` leaves them out, errors never quote a key file's content.
"""

import hmac
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from corolla.errors import BadInput

KEY_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_KEYS: Final = 4
"""At once: the old and the new while rotating, and as many again."""

_HEAD: Final = "corolla-swarm-key-1:"
_MAX_FILE_BYTES: Final = 4096
_OPEN_TO_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """One shared secret. Never printed."""

    secret: bytes = field(repr=False)

    def line(self) -> str:
        """The key as its file holds it, without the line's end."""
        return _HEAD + self.secret.hex()


def new_key() -> SwarmKey:
    """A fresh random key."""
    return SwarmKey(secrets.token_bytes(KEY_BYTES))


def load_keys(paths: Sequence[Path]) -> tuple[SwarmKey, ...]:
    """The keys of these files, in this order. Raises BadInput, naming the file and the cure."""
    return tuple(_load(path) for path in paths)


def parse_key(text: str) -> SwarmKey:
    """The key that one line holds. Raises BadInput, which says what is wrong but never quotes the text."""
    line = text.strip()
    if not line:
        raise BadInput("it is empty")
    if "\n" in line:
        raise BadInput("it has more than one line: give each key a file and repeat the flag")
    if not line.startswith(_HEAD):
        raise BadInput(f"it does not begin with {_HEAD!r}: make one with `corolla key new`")
    digits = line.removeprefix(_HEAD)
    if re.fullmatch(r"[0-9a-f]{64}", digits) is None:
        raise BadInput(f"after {_HEAD!r} it needs 64 hex digits in lower case, and has {len(digits)} characters")
    return SwarmKey(bytes.fromhex(digits))


def prove(key: SwarmKey, domain: bytes, *fields: bytes) -> bytes:
    """What only a holder of the key can say about these fields."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in (domain, *fields))
    return hmac.digest(key.secret, message, "sha256")


def find_prover(keys: Sequence[SwarmKey], proof: bytes, domain: bytes, *fields: bytes) -> SwarmKey | None:
    """The key that made this proof; None when it was none of ours. Takes the same time whichever it was."""
    return find_common(keys, proof, domain, *fields) if len(proof) == PROOF_BYTES else None


def prove_all(keys: Sequence[SwarmKey], domain: bytes, *fields: bytes) -> bytes:
    """A proof with each of the keys, one after the other."""
    return b"".join(prove(key, domain, *fields) for key in keys)


def find_common(keys: Sequence[SwarmKey], proofs: bytes, domain: bytes, *fields: bytes) -> SwarmKey | None:
    """The first of our keys that one of these proofs was made with; None when none was, or when there are too many."""
    if len(proofs) > MAX_KEYS * PROOF_BYTES:
        return None
    said = [proofs[start : start + PROOF_BYTES] for start in range(0, len(proofs), PROOF_BYTES)]
    ours = [(key, prove(key, domain, *fields)) for key in keys]
    common = [key for key, proof in ours if any(hmac.compare_digest(proof, other) for other in said)]
    return common[0] if common else None


def _load(path: Path) -> SwarmKey:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise BadInput(f"swarm key {path} is not a regular file: make one with `corolla key new > FILE`")
        if mode & _OPEN_TO_OTHERS:
            raise BadInput(
                f"swarm key {path} is open to others (mode {stat.S_IMODE(mode):04o}), who could join as members: "
                f"run `chmod 600 {path}`"
            )
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise BadInput(f"swarm key {path} cannot be read: {fault.strerror or fault}") from fault
    try:
        return parse_key(content.decode("ascii") if len(content) <= _MAX_FILE_BYTES else "")
    except UnicodeDecodeError:
        raise BadInput(f"swarm key {path} is no text file: make one with `corolla key new > FILE`") from None
    except BadInput as wrong:
        raise BadInput(f"swarm key {path} holds no key: {wrong}") from None
