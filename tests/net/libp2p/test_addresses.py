"""Addresses: what a user may write, and the words for what cannot work."""

import socket

import pytest

from corolla.errors import BadInput
from corolla.net.identity import from_seed
from corolla.net.libp2p.addresses import (
    HostPort,
    check_can_listen,
    most_reachable_first,
    parse_host_port,
    parse_peer_address,
    resolve,
)
from corolla.net.libp2p.config import NetworkConfig

PEER = from_seed(b"p" * 32).peer


@pytest.mark.parametrize(
    ("text", "multiaddr"),
    [
        ("127.0.0.1:0", "/ip4/127.0.0.1/tcp/0"),
        ("0.0.0.0:31337", "/ip4/0.0.0.0/tcp/31337"),
        ("[::1]:31337", "/ip6/::1/tcp/31337"),
        ("my_server.example.org:65535", "/dns/my_server.example.org/tcp/65535"),
    ],
)
def test_host_and_port_become_a_multiaddr(text: str, multiaddr: str) -> None:
    assert parse_host_port(text).multiaddr == multiaddr
    assert str(parse_host_port(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1", ":31337", "host:", "host:x", "host:65536", "host:-1", "host:１", "::1:31337", "[::1]"),
        *("[fe80::1%eth0]:1", "a/b:1", "sp ace:1", "-x:1", "x,y:1", "h" * 300 + ":1"),
    ],
)
def test_what_is_no_host_and_port_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_host_port(text)
    assert repr(text)[:100] in str(refused.value)


@pytest.mark.parametrize("kind_and_host", ["ip4/10.0.0.1", "ip6/::1", "dns/a.example", "dns4/a.example", "dns6/a"])
def test_a_peers_address_survives_the_way_to_text_and_back(kind_and_host: str) -> None:
    text = f"/{kind_and_host}/tcp/31337/p2p/{PEER}"
    assert str(parse_peer_address(text)) == text
    assert parse_peer_address(f" {text}\n").peer == PEER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:31337",
        "/ip4/10.0.0.1/tcp/31337",
        f"/ip4/10.0.0.1/udp/31337/quic/p2p/{PEER}",
        f"/ip4/10.0.0.1/tcp/31337/p2p/{PEER}/p2p-circuit",
        f"/ip4/::1/tcp/31337/p2p/{PEER}",
        f"/ip6/10.0.0.1/tcp/31337/p2p/{PEER}",
        f"/ip4//tcp/31337/p2p/{PEER}",
        f"/ip4/10.0.0.1/tcp/99999/p2p/{PEER}",
        "/ip4/10.0.0.1/tcp/31337/p2p/0OIl",
        "/ip4/10.0.0.1/tcp/31337/p2p/",
        f"/dns/a b/tcp/1/p2p/{PEER}",
    ],
)
def test_what_is_no_peers_address_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_peer_address(text)


def test_a_name_is_resolved_before_it_is_listened_on() -> None:
    assert resolve(parse_host_port("localhost:7")).host in ("127.0.0.1", "::1")
    assert resolve(HostPort("ip4", "10.1.2.3", 7)) == HostPort("ip4", "10.1.2.3", 7)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_refused_by_name_however_it_is_shared(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((host, 0))
        other.listen()
        endpoint = HostPort("ip6" if ":" in host else "ip4", host, other.getsockname()[1])
        with pytest.raises(BadInput, match=str(endpoint.port)):
            check_can_listen(endpoint)
    check_can_listen(endpoint)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(BadInput, match=r"192\.0\.2\.1:0"):
        check_can_listen(HostPort("ip4", "192.0.2.1", 0))


def test_the_address_to_copy_to_another_machine_comes_first() -> None:
    addresses = ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1", "/ip4/10.0.0.1/tcp/1"]
    assert most_reachable_first(addresses)[0] == "/ip4/10.0.0.1/tcp/1"


def test_a_configuration_is_checked_when_it_is_made() -> None:
    with pytest.raises(BadInput, match="nonsense"):
        NetworkConfig(listen=("nonsense",))
    with pytest.raises(BadInput, match="announce"):
        NetworkConfig(announce=("example.org:0",))


def test_servers_listen_on_loopback_and_clients_nowhere_unless_told() -> None:
    assert [str(endpoint) for endpoint in NetworkConfig().listen_on] == ["127.0.0.1:0"]
    assert NetworkConfig(is_client=True).listen_on == ()
    assert [endpoint.port for endpoint in NetworkConfig(is_client=True, listen=("0.0.0.0:5",)).listen_on] == [5]
