"""What a gateway is told at start: every bound has one place."""

from dataclasses import dataclass, field

from corolla.apps.gateway.keys import KeyRing
from corolla.errors import BadInput


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Times in seconds."""

    keys: KeyRing = field(default_factory=KeyRing)
    max_active: int = 64
    """Answers written at the same time; each holds a session on the swarm."""
    max_waiting: int = 256
    """Requests in line behind them; one more is told to come later."""
    wait_s: float = 30.0
    """How long a request stands in line."""
    default_new_tokens: int = 1024
    """Longest answer to a request that does not say: servers lease their cache for all of it."""
    keep_s: float = 120.0
    """How long a finished conversation's session is kept for its next message; 0: not at all."""
    max_kept: int = 32
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    """For a request to arrive, head and body."""
    send_timeout_s: float = 60.0
    """A reader that takes nothing for so long is gone: its session holds cache that others wait for."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of other origins that may use this gateway; none by default."""
    hosts: tuple[str, ...] | None = None
    """Names under which this gateway may be called; None: any. Without it, a page whose name is made to point at
    127.0.0.1 could use a gateway that asks for no key."""

    def __post_init__(self) -> None:
        for name in (
            "max_active",
            "default_new_tokens",
            "max_body_bytes",
            "body_timeout_s",
            "send_timeout_s",
            "wait_s",
        ):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name} must be positive, not {getattr(self, name)}")
        if self.keep_s < 0 or self.max_kept < 0 or self.max_waiting < 0:
            raise BadInput("keep_s, max_kept and max_waiting cannot be negative")
        if "*" in self.cors_origins:
            raise BadInput("name the origins that may use the gateway, like https://chat.example.org; * is none")
