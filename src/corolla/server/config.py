"""What a server is told at start: one frozen value, checked once. No torch here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.models.source_options import SourceOptions
from corolla.net.liveness import Liveness

DTypeChoice = Literal["auto", "bfloat16", "float16", "float32"]
QuantizationChoice = Literal["none", "int8", "nf4"]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one server grants to clients. Every bound is told to whoever runs into it."""

    max_sessions: int = 256
    max_sessions_per_peer: int = 64
    max_session_tokens: int = 8192
    """Positions per row; lowered to what the model knows."""
    max_rows: int = 128
    max_chunk_tokens: int = 4096
    """Most positions × rows in one step: bounds the memory and the time that one pass takes."""
    max_chunk_bytes: int = 16 << 20
    """Most bytes of hidden states in one step (a message may have 64 MB)."""
    max_journal_bytes: int = 16 << 30
    """What all sessions together may keep in host memory of what they pushed on, to rebuild servers that are lost;
    lowered to a share of what the machine has free (`memory.py`)."""
    max_waiting_steps: int = 1024
    """Steps in line for the device thread before new ones are refused as `Overloaded`."""
    cache_wait_s: float = 5.0
    """How long an `Open` waits in line for cache before `CacheFull`."""
    idle_timeout_s: float = 600.0
    """A session without a step for this long is dropped."""
    dial_timeout_s: float = 5.0
    """How long we try to reach the next hop of a route before `LinkDown`."""
    attach_timeout_s: float = 5.0
    """A data stream must say within this time which session it belongs to."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise BadInput(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server: which blocks of which model, on which device, under which name."""

    model: str | Path
    """A directory, a GGUF file or a hub's OWNER/NAME (`models/source.py`)."""
    source: SourceOptions = field(default_factory=SourceOptions)
    blocks: tuple[int, int] | None = None
    """Half-open span, kept; None: as many blocks as fit, where they help most (`hosting.py`)."""
    num_blocks: int | None = None
    """Host so many, where they help most; None: as many as fit."""
    device: str = "cpu"
    dtype: DTypeChoice = "auto"
    quantization: QuantizationChoice = "none"
    """How the blocks' linear layers are held; announced, since outputs differ."""
    name: str = ""
    """Shown to people in `corolla status`."""
    model_name: str | None = None
    """Display name of the model; None: the directory's."""
    cache_tokens: int = 65536
    """KV cache of the whole server, in positions × rows."""
    listed: frozenset[PeerId] = frozenset()
    """Clients for whom a share of the server is kept, whom caps by address do not bind (`admission.py`), and who are
    heavy only to each other (`fairness.py`)."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    liveness: Liveness = field(default_factory=Liveness)
    drain_timeout_s: float = 60.0
    """How long a server that leaves goes on serving, for its clients to move away."""
    announce_period_s: float = 45.0
    record_lifetime_s: float = 180.0
    """Must outlive the period by the tolerated clock skew of 60 s and a margin (`net/records.py`)."""

    def __post_init__(self) -> None:
        if self.blocks is not None and self.num_blocks is not None:
            raise BadInput("--blocks says which blocks and so how many: leave --num-blocks out")
        if self.cache_tokens < 1:
            raise BadInput(f"the KV cache must hold at least one token, not {self.cache_tokens}")
        if self.record_lifetime_s < self.announce_period_s + 60:
            raise BadInput(
                f"records that live {self.record_lifetime_s:g} s and are renewed every {self.announce_period_s:g} s "
                "vanish for peers whose clock is a minute ahead"
            )

    def span_of(self, model: str, num_blocks: int) -> tuple[int, int] | None:
        """What `--blocks` says; None: nothing. Raises BadInput when the model, of so many blocks, has no such span."""
        if self.blocks is None:
            return None
        start, end = self.blocks
        if not 0 <= start < end <= num_blocks:
            raise BadInput(
                f"--blocks {start}:{end} is not a span of {model}: it has blocks 0:{num_blocks}, and a span A:B needs "
                f"0 ≤ A < B ≤ {num_blocks}"
            )
        return start, end
