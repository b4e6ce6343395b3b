"""A client's bounds: every wait on another machine has one here."""

from dataclasses import dataclass, field
from typing import get_args

from corolla.client.lists import ServerLists
from corolla.errors import BadInput
from corolla.net.liveness import Liveness
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Mode


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Times in seconds."""

    join_timeout_s: float = 15.0
    """How long to try the initial peers before `NoPeers`."""
    dial_timeout_s: float = 5.0
    open_timeout_s: float = 20.0
    """For a server's answer to `Open`: longer than it may let us wait in line for its cache."""
    step_timeout_s: float = 180.0
    """For one step, besides the time that its bytes travel: a server that answers heartbeats may be this slow. Whoever
    lets it pass is replaced once; then the step fails."""
    wait_for_servers_s: float = 60.0
    """How long a session waits for a server to appear when nothing covers a lost block."""
    shun_s: float = 60.0
    """How long a session leaves out a server that failed it."""
    refresh_period_s: float = 30.0
    """How often the view of the swarm is read anew while it is used."""
    max_chunk_tokens: int = 2048
    """Most positions × rows sent in one step; a server may ask for less."""
    max_journal_bytes: int = 4 << 30
    """Of what all sessions together keep of what they pushed, to rebuild a lost first server: 30 texts of 8,192 tokens
    of 16 KB each. Beyond that idle sessions give theirs up, and then new steps are refused."""
    liveness: Liveness = field(default_factory=Liveness)
    cost: CostModel = field(default_factory=CostModel)
    mode: Mode = "min_latency"
    """Of routes: the fastest chain for one who waits, or ("max_throughput") spread over chains for batch work."""
    exact: bool = False
    """Bit for bit the same text however often servers are lost, in every number format: replays then repeat each step
    as it was, which takes longer, and a prompt is cut as on one machine, and not to suit the route."""
    servers: ServerLists = field(default_factory=ServerLists)
    """Whom to be served by; the default is anybody."""

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "dial_timeout_s", "open_timeout_s", "step_timeout_s", "refresh_period_s"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_journal_bytes < 1:
            raise BadInput(f"max_journal_bytes must be positive, not {self.max_journal_bytes}")
        if self.mode not in get_args(Mode):
            raise BadInput(f"mode {self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.max_chunk_tokens < 1:
            raise BadInput(f"max_chunk_tokens must be at least 1, not {self.max_chunk_tokens}")
