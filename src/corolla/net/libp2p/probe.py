"""Who listens at an address? Asked on a TCP connection of our own, beside the daemon's.

Far enough into libp2p's handshake to know: multistream-select, then TLS 1.3, whose certificate carries the listener's
peer key and that key's signature over the certificate's own (libp2p TLS spec). OpenSSL has checked that the listener
holds the certificate's key, whoever issued it. We show no certificate and close.
"""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import public_key_of
from corolla.net.libp2p.addresses import PeerAddress, parse_peer_address
from corolla.net.reach import Verdict

_MULTISTREAM: Final = b"/multistream/1.0.0"
_TLS: Final = b"/tls/1.0.0"
_ALPN: Final = "libp2p"
_KEY_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX: Final = b"libp2p-tls-handshake:"
_KEY_BYTES: Final = 36
"""A peer id's protobuf key: what follows its two bytes of identity multihash."""
_SIGNATURE_BYTES: Final = 64


class _AnotherListens(Exception):
    """Not the peer, or nothing that speaks libp2p."""


async def locate(address: str) -> Sequence[str]:
    """The numeric addresses that a multiaddr leads to; none for what is no address of a peer."""
    try:
        endpoint = parse_peer_address(address).endpoint
    except BadInput:
        return []
    if not endpoint.kind.startswith("dns"):
        return [endpoint.host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter of a name with a part of more than 63 letters
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def probe(host: str, address: str, peer: PeerId) -> Verdict:
    """Whether this peer answers at the multiaddr, whose numeric host is `host`; the caller bounds the wait."""
    try:
        place = parse_peer_address(address)
        if place.peer != peer:
            return "other"
        await _meet(host, place)
    except BadInput:
        return "refused"
    except (_AnotherListens, asyncio.IncompleteReadError, ssl.SSLError, ConnectionResetError, ValueError):
        return "other"
    except OSError:
        return "refused"
    return "reached"


async def _meet(host: str, place: PeerAddress) -> None:
    reader, writer = await asyncio.open_connection(host, place.endpoint.port)
    try:
        await _agree_on_tls(reader, writer)
        await writer.start_tls(_context())
        session = writer.get_extra_info("ssl_object")
        certificate = session.getpeercert(binary_form=True) if session is not None else None
        if certificate is None:
            raise _AnotherListens("no certificate")
        _check_certificate(certificate, place.peer)
    finally:
        writer.transport.abort()


async def _agree_on_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """multistream-select: each line is its length in one byte, the text, a newline."""
    for word in (_MULTISTREAM, _TLS):
        writer.write(bytes([len(word) + 1]) + word + b"\n")
    for word in (_MULTISTREAM, _TLS):
        length = (await reader.readexactly(1))[0]
        if length != len(word) + 1 or await reader.readexactly(length) != word + b"\n":
            raise _AnotherListens("it does not speak libp2p over TLS")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # self-signed by design; what counts is the signature inside
    context.set_alpn_protocols([_ALPN])
    return context


def _check_certificate(encoded: bytes, peer: PeerId) -> None:
    """The peer's own key vouches for the certificate's. Raises _AnotherListens."""
    certificate = x509.load_der_x509_certificate(encoded)
    try:
        extension = certificate.extensions.get_extension_for_oid(_KEY_EXTENSION).value
        assert isinstance(extension, x509.UnrecognizedExtension)
        subject = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        public_key_of(peer).verify(_signature(extension.value), _SIGNED_PREFIX + subject)
    except (x509.ExtensionNotFound, InvalidSignature) as fault:
        raise _AnotherListens("its certificate is not of this peer") from fault


def _signature(extension: bytes) -> bytes:
    """Of SEQUENCE {key OCTET STRING, signature OCTET STRING}, both of the only sizes that they have with Ed25519. Which
    key it says does not matter: the signature is checked with the peer's own."""
    head = bytes([0x30, 2 + _KEY_BYTES + 2 + _SIGNATURE_BYTES, 0x04, _KEY_BYTES])
    middle, signature = extension[4 + _KEY_BYTES :][:2], extension[6 + _KEY_BYTES :]
    if extension[:4] != head or middle != bytes([0x04, _SIGNATURE_BYTES]) or len(signature) != _SIGNATURE_BYTES:
        raise _AnotherListens("its peer key is of another kind")
    return signature
