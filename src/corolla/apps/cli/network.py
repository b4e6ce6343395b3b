"""From the shared network options to the network's own configuration. Imports the network, so not for `--help`."""

from collections.abc import Sequence
from pathlib import Path

from corolla.net.libp2p.config import NetworkConfig

JOIN_TIMEOUT_S = 30.0
"""How long a serving peer tries the addresses of `--join`; a restarting bootstrap peer is back within that."""


def server_network(*, listen: Sequence[str], announce: Sequence[str], identity: Path | None) -> NetworkConfig:
    """A peer that others reach and that keeps its part of the hash table."""
    return NetworkConfig(identity=identity, listen=tuple(listen), announce=tuple(announce))


def client_network() -> NetworkConfig:
    """A peer that only asks, under a new identity each time."""
    return NetworkConfig(is_client=True)
