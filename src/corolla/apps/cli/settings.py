"""What one run of the command line carries from its options to its frame."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class RunSettings:
    """Made by `main.run`, filled in by the options of the command that runs."""

    debug: bool = False
    """Show the traceback of what went wrong."""
    swarm_keys: tuple[Path, ...] = ()
    """Key files of a private swarm; each is proven and accepted."""
    identity: Path | None = None
    """Key file of a peer that only asks; None: a new id."""
    allow: tuple[Path, ...] = ()
    """Files of peer ids that may dial us; none: all."""
    allow_servers: tuple[str, ...] = ()
    """Peer ids of the only servers to use; none: all."""
    block_servers: tuple[str, ...] = ()
    """Peer ids of servers not to use."""
    exact: bool = False
    """Replays repeat each step as it was: the same text, bit for bit, when servers are lost."""
    server_quantization: str = "any"
    """`none`: only servers whose weights are not quantized."""
