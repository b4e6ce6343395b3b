"""Names that must not be mixed up: who a peer is, which session, which model.

Each is a plain value with a `NewType` around it, so that the type checker keeps them apart.
"""

import secrets
from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id (`12D3KooW…`); an Ed25519 one contains the peer's public key."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes, chosen by the client. A session belongs to (client peer id, session id)."""

Fingerprint = NewType("Fingerprint", str)
"""32 hex digits that say which weights (`models/fingerprint.py`): tells mistakes, not lies."""

SESSION_ID_BYTES = 16


def new_session_id() -> SessionId:
    """A fresh session id; random, so that nobody guesses another client's."""
    return SessionId(secrets.token_bytes(SESSION_ID_BYTES))


def short(peer: PeerId) -> str:
    """The last eight characters of a peer id: enough to tell peers apart in a log line."""
    return str(peer)[-8:]
