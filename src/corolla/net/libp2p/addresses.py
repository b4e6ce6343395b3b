"""Addresses as users write them (`HOST:PORT`, `/ip4/…/tcp/…/p2p/ID`) and as the daemon wants them.

Only plain TCP: QUIC would expose an old stack to the internet for no gain here.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import peer_id_bytes

HostKind = Literal["ip4", "ip6", "dns", "dns4", "dns6"]
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP endpoint. `kind` is its name in a multiaddr."""

    kind: HostKind
    host: str
    port: int

    @property
    def multiaddr(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and who it must prove to be."""

    peer: PeerId
    endpoint: HostPort

    def __str__(self) -> str:
        return f"{self.endpoint.multiaddr}/p2p/{self.peer}"


def parse_host_port(text: str) -> HostPort:
    """`HOST:PORT` or `[IPv6]:PORT`. Raises BadInput."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadInput(f"address {text!r}: write an IPv6 address in brackets, as in [::1]:31337")
    if not colon or not host:
        raise BadInput(f"address {text!r} is not HOST:PORT, as in 0.0.0.0:31337")
    return HostPort(_kind_of(host, text), host, _port(port, text))


def parse_peer_address(text: str) -> PeerAddress:
    """`/ip4/…/tcp/…/p2p/ID`, also with ip6, dns, dns4, dns6. Raises BadInput."""
    match text.strip().split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6" as kind, host, "tcp", port, "p2p" | "ipfs", peer]:
            endpoint = HostPort(kind, host, _port(port, text))
        case _:
            raise BadInput(f"address {text!r:.200} is not of the form /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID")
    if _kind_of(host, text) != ("dns" if kind.startswith("dns") else kind):
        raise BadInput(f"address {text!r:.200}: {host!r} is not an {kind} address")
    try:
        peer_id_bytes(PeerId(peer))
    except ValueError as fault:
        raise BadInput(f"address {text!r:.200}: {fault}") from fault
    return PeerAddress(PeerId(peer), endpoint)


def resolve(endpoint: HostPort) -> HostPort:
    """The same endpoint with a numeric host: a name cannot be listened on. Raises BadInput."""
    if not endpoint.kind.startswith("dns"):
        return endpoint
    try:
        family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
    except OSError as fault:
        raise BadInput(f"cannot listen on {endpoint}: {fault.strerror or fault}") from fault
    return HostPort("ip6" if family == socket.AF_INET6 else "ip4", str(address[0]), endpoint.port)


def check_can_listen(endpoint: HostPort) -> None:
    """Raise BadInput when this machine does not let us listen there (in use, not ours, privileged).

    Asked of the operating system beforehand, because the daemon shares ports with other daemons of the same user
    (SO_REUSEPORT): two servers on one port would take turns in answering.
    """
    family = socket.AF_INET6 if endpoint.kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((endpoint.host, endpoint.port))
            probe.listen(1)
    except OSError as fault:
        raise BadInput(f"cannot listen on {endpoint}: {fault.strerror or fault}") from fault


def most_reachable_first(multiaddrs: Sequence[str]) -> list[str]:
    """Loopback addresses last: the first one is what a user copies to another machine."""
    return sorted(multiaddrs, key=lambda address: address.startswith(("/ip4/127.", "/ip6/::1/")))


def _kind_of(host: str, address: str) -> Literal["ip4", "ip6", "dns"]:
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise BadInput(f"address {address!r:.200}: {host!r:.80} is neither an IP address nor a host name") from None
        return "dns"
    if isinstance(parsed, ipaddress.IPv4Address):
        return "ip4"
    if parsed.scope_id is not None:
        raise BadInput(
            f"address {address!r:.200}: an address bound to one interface (%{parsed.scope_id}) cannot be used"
        )
    return "ip6"


def _port(text: str, address: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise BadInput(f"address {address!r:.200}: port {text!r:.20} is not between 0 and 65535")
    return int(text)
