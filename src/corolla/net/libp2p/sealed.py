"""The swarm key on the DHT's own messages: who does not prove it can neither ask nor answer.

A request carries a time, a nonce and a proof over (method, dialer, listener, all its bytes) with each of the dialer's
keys; the response a proof, with the first of the listener's that is among them, over the same two peers, the request's
proofs and all its bytes. Both names are those that the transport has authenticated. A request counts once, within the
time for which clocks may differ.

Put around hivemind's calls before its DHT node registers its handlers, so that there is no moment without it. The
list of allowed peers is checked first.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from corolla.clock import WallClock
from corolla.errors import SwarmError
from corolla.ids import PeerId, short
from corolla.net.gate import GateConfig
from corolla.net.identity import peer_id_from_bytes
from corolla.net.records import CLOCK_SKEW_S
from corolla.net.swarm_key import SwarmKey, find_common, find_prover, prove, prove_all

log = logging.getLogger(__name__)

WINDOW_S: Final = 2 * CLOCK_SKEW_S
"""How far a request's time may be from ours: each of the two clocks may be off by what is tolerated."""
MAX_NONCES: Final = 100_000
"""Remembered at most; 400 requests a second for as long as each is remembered. Only members make us remember."""

Admit = Callable[[PeerId, Any], Awaitable[None]]
"""Takes a caller and its request."""

_REQUEST: Final = b"corolla dht 1, request"
_RESPONSE: Final = b"corolla dht 1, response"
_NONCE_BYTES: Final = 16


class CallRefused(SwarmError):
    """A message without a proof that we accept; the text may travel to who sent it."""


@dataclass(frozen=True, slots=True)
class Call:
    """What each message of a call is bound to."""

    method: str
    dialer: PeerId
    listener: PeerId

    @property
    def fields(self) -> tuple[bytes, ...]:
        return self.method.encode(), self.dialer.encode(), self.listener.encode()


@dataclass(slots=True)
class SeenNonces:
    """Nonces of the requests that were accepted, for as long as their time would be accepted again."""

    limit: int = MAX_NONCES
    _seen: "OrderedDict[bytes, float]" = field(default_factory=lambda: OrderedDict[bytes, float]())

    def note(self, nonce: bytes, now: float) -> bool:
        """False when it was seen before, or when there is no room to remember it."""
        while self._seen and next(iter(self._seen.values())) <= now:
            self._seen.popitem(last=False)
        if nonce in self._seen or len(self._seen) >= self.limit:
            return False
        self._seen[nonce] = now + 2 * WINDOW_S  # a request from the future is good for so long
        return True


class CallSeal:
    """Signs and checks the messages of one peer's calls; without a key it only keeps to the list."""

    def __init__(self, own: PeerId, config: GateConfig, now: WallClock) -> None:
        self._own = own
        self._config = config
        self._now = now
        self._seen = SeenNonces()

    def sign_request(self, call: Call, request: Any) -> None:
        request.auth.time = self._now()
        request.auth.nonce = secrets.token_bytes(_NONCE_BYTES)
        request.auth.signature = prove_all(self._config.keys, _REQUEST, *call.fields, _unsigned(request))

    def check_request(self, call: Call, request: Any) -> SwarmKey | None:
        """The key that it proves of those that we have, None in an open swarm. Raises CallRefused."""
        if not self._config.allows(call.dialer):
            raise CallRefused("this peer answers only those on its list")
        if not self._config.is_private:
            return None
        proofs, sent_at, now = bytes(request.auth.signature), float(request.auth.time), self._now()
        key = find_common(self._config.keys, proofs, _REQUEST, *call.fields, _unsigned(request))
        if key is None:
            raise CallRefused("this swarm is private: the swarm key is missing, or is another")
        if not abs(now - sent_at) <= WINDOW_S:
            raise CallRefused(f"the clocks of both peers are {abs(now - sent_at):.0f} s apart, or this was sent before")
        if not self._seen.note(bytes(request.auth.nonce), now):
            raise CallRefused("this was sent before, or too much was")
        return key

    def sign_response(self, call: Call, key: SwarmKey, request: Any, response: Any) -> None:
        proven = bytes(request.auth.signature)
        response.auth.signature = prove(key, _RESPONSE, *call.fields, proven, _unsigned(response))

    def check_response(self, call: Call, request: Any, response: Any) -> None:
        """Raises CallRefused."""
        proof, asked = bytes(response.auth.signature), bytes(request.auth.signature)
        if find_prover(self._config.keys, proof, _RESPONSE, *call.fields, asked, _unsigned(response)) is None:
            raise CallRefused("it does not prove the swarm key: it may be of an open swarm, or of another")

    # Around hivemind's calls.

    def put_around(self, p2p: Any, admit: Admit) -> None:
        """Seal every call that this `P2P` makes and takes from now on.

        `admit` runs first in the task of each taken one, and may raise CallRefused.
        """
        if self._config.is_private:
            p2p.call_protobuf_handler = self._sealing(p2p.call_protobuf_handler)
        p2p.add_protobuf_handler = self._checking(p2p.add_protobuf_handler, admit)

    def _sealing(self, call_plain: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call_sealed(peer: Any, name: str, request: Any, response_type: Any) -> Any:
            call = Call(name, self._own, peer_id_from_bytes(peer.to_bytes()))
            self.sign_request(call, request)
            response = await call_plain(peer, name, request, response_type)
            self.check_response(call, request, response)
            return response

        return call_sealed

    def _checking(self, add_plain: Callable[..., Awaitable[None]], admit: Admit) -> Callable[..., Awaitable[None]]:
        async def add_checked(name: str, handler: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> None:
            async def checked(request: Any, context: Any) -> Any:
                call = Call(name, peer_id_from_bytes(context.remote_id.to_bytes()), self._own)
                try:
                    await admit(call.dialer, request)
                    key = self.check_request(call, request)
                except CallRefused as refused:
                    log.debug("call refused", extra={"peer": short(call.dialer), "reason": str(refused)})
                    raise
                response = await handler(request, context)
                if key is not None:
                    self.sign_response(call, key, request, response)
                return response

            await add_plain(name, checked, *args, **kwargs)

        return add_checked


def _unsigned(message: Any) -> bytes:
    """The message's bytes without its proof."""
    proof = message.auth.signature
    message.auth.signature = b""
    encoded: bytes = message.SerializeToString(deterministic=True)
    message.auth.signature = proof
    return encoded
