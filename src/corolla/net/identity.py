"""Who a peer is: one Ed25519 key, for the transport's handshake and for signing records.

The peer id *contains* the public key (an "identity" multihash of libp2p's protobuf key), so nothing has to be
looked up to check a signature. Keys are kept in libp2p's own file format, which the network daemon loads as it is.
"""

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from corolla.errors import BadInput
from corolla.ids import PeerId

SEED_BYTES: Final = 32
MAX_PEER_ID_CHARS: Final = 128

# libp2p peer-ids spec, "Keys": protobuf {1: type = Ed25519, 2: data}. A private key's data is seed ‖ public key.
_PRIVATE_KEY_HEAD: Final = b"\x08\x01\x12\x40"
_PUBLIC_KEY_HEAD: Final = b"\x08\x01\x12\x20"
_IDENTITY_MULTIHASH_HEAD: Final = b"\x00\x24"
_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES: Final = {digit: value for value, digit in enumerate(_BASE58)}
_NOT_OURS_ALONE: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and the peer id that follows from it. Never printed: `repr` leaves the key out."""

    seed: bytes = field(repr=False)
    peer: PeerId
    key: Ed25519PrivateKey = field(repr=False, compare=False)
    """What the seed stands for: making it takes as long as signing with it."""

    def sign(self, message: bytes) -> bytes:
        """64 bytes that anyone can check with `public_key_of(peer)`."""
        return self.key.sign(message)

    def key_file(self) -> bytes:
        """The content of this identity's key file."""
        return _PRIVATE_KEY_HEAD + self.seed + public_key_of(self.peer).public_bytes_raw()


def load_or_create(path: Path) -> Identity:
    """The identity in this file; a new one is written there, readable by its owner only, when there is none.

    Raises BadInput, naming the file, when it cannot be read, is open to others or holds something else.
    """
    try:
        if not path.exists():
            _write_once(path, ephemeral())
        return _load(path)
    except OSError as fault:
        raise BadInput(f"identity file {path} cannot be used: {fault.strerror or fault}") from fault


def ephemeral() -> Identity:
    """A fresh random identity, kept nowhere."""
    return from_seed(secrets.token_bytes(SEED_BYTES))


def from_seed(seed: bytes) -> Identity:
    """The identity that these 32 private bytes stand for."""
    key = Ed25519PrivateKey.from_private_bytes(seed)
    public = key.public_key().public_bytes_raw()
    return Identity(seed, peer_id_from_bytes(_IDENTITY_MULTIHASH_HEAD + _PUBLIC_KEY_HEAD + public), key)


def public_key_of(peer: PeerId) -> Ed25519PublicKey:
    """The key that an Ed25519 peer id contains. Raises ValueError for any other text."""
    head = _IDENTITY_MULTIHASH_HEAD + _PUBLIC_KEY_HEAD
    raw = peer_id_bytes(peer)
    if len(raw) != len(head) + SEED_BYTES or not raw.startswith(head):
        raise ValueError(f"not an Ed25519 peer id: {peer!r:.80}")
    return Ed25519PublicKey.from_public_bytes(raw[len(head) :])


def peer_id_bytes(peer: PeerId) -> bytes:
    """A peer id as the daemon says it: the multihash behind the base58 text. Raises ValueError."""
    if not 0 < len(peer) <= MAX_PEER_ID_CHARS:
        raise ValueError(f"not a peer id: {peer!r:.80}")
    number = 0
    for digit in peer:
        if digit not in _BASE58_VALUES:
            raise ValueError(f"not a peer id: {peer!r:.80}")
        number = number * 58 + _BASE58_VALUES[digit]
    leading_zeros = len(peer) - len(peer.lstrip(_BASE58[0]))
    return bytes(leading_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_from_bytes(raw: bytes) -> PeerId:
    """The base58 text of a peer id's multihash."""
    digits: list[str] = []
    number = int.from_bytes(raw, "big")
    while number:
        number, value = divmod(number, 58)
        digits.append(_BASE58[value])
    leading_zeros = len(raw) - len(raw.lstrip(b"\x00"))
    return PeerId(_BASE58[0] * leading_zeros + "".join(reversed(digits)))


def _load(path: Path) -> Identity:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise BadInput(f"identity file {path} is not a regular file: give the path of a key file, or of none yet")
    if mode & _NOT_OURS_ALONE:
        raise BadInput(
            f"identity file {path} is open to others (mode {stat.S_IMODE(mode):04o}), who could pose as this peer: "
            f"run `chmod 600 {path}`, or delete it to get a new identity"
        )
    content = path.read_bytes()
    identity = from_seed(content[len(_PRIVATE_KEY_HEAD) :][:SEED_BYTES]) if len(content) == _FILE_BYTES else None
    if identity is None or identity.key_file() != content:
        raise BadInput(
            f"identity file {path} holds no Ed25519 key in libp2p's format ({len(content)} bytes, "
            f"{_FILE_BYTES} expected): give another file, or delete it to get a new identity"
        )
    return identity


def _write_once(path: Path, identity: Identity) -> None:
    """Put the key at `path` whole or not at all; when another process was first, its key stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(identity.key_file())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, never replaces the key of a process that was faster
    finally:
        draft.unlink()


_FILE_BYTES: Final = len(_PRIVATE_KEY_HEAD) + 2 * SEED_BYTES
