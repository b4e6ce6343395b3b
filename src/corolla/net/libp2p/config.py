"""What a user may say about this peer's place in the network."""

from dataclasses import dataclass, field
from pathlib import Path

from corolla.clock import WallClock, wall_time
from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.gate import GateConfig
from corolla.net.guard import StreamLimits
from corolla.net.identity import Identity
from corolla.net.libp2p.addresses import HostPort, parse_host_port

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Checked when made: a wrong address is BadInput before anything starts."""

    identity: Path | Identity | None = None
    """A key file (made when missing), a ready identity, or None for one that ends with the transport."""
    listen: tuple[str, ...] | None = None
    """HOST:PORT each; port 0 takes a free one. None: loopback, or nowhere for a client."""
    announce: tuple[str, ...] = ()
    """HOST:PORT that others should dial instead, behind a port forward."""
    is_client: bool = False
    """Uses the DHT without keeping records for others: for peers that come and go."""
    directory: Path | None = None
    """Where sockets go; None: a per-user directory among the system's temporary files."""
    gate: GateConfig = field(default=GateConfig())
    """Swarm keys and the list of allowed peers; the default is an open swarm."""
    listed: frozenset[PeerId] = frozenset()
    """Peers whose streams are taken whatever others of their address do (`net/guard.py`)."""
    stream_limits: StreamLimits = field(default=StreamLimits())
    wall_clock: WallClock = field(default=wall_time)

    def __post_init__(self) -> None:
        assert self.listen_on is not None
        for endpoint in self.announce_as:
            if endpoint.port == 0:
                raise BadInput(f"cannot announce {endpoint}: others need the port's number")

    @property
    def listen_on(self) -> tuple[HostPort, ...]:
        default = () if self.is_client else (LOOPBACK,)
        return tuple(parse_host_port(text) for text in (default if self.listen is None else self.listen))

    @property
    def announce_as(self) -> tuple[HostPort, ...]:
        return tuple(parse_host_port(text) for text in self.announce)
