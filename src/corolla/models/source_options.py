"""What a user says of where a model comes from. Imports nothing of weight: configurations hold it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Where a model may come from, as a user says it once for a command."""

    revision: str | None = None
    token: str | None = None
    """For gated repositories; None: the saved login or HF_TOKEN."""
    cache_dir: Path | None = None
    max_disk_bytes: int | None = None

    def __repr__(self) -> str:  # a token never reaches a log
        return f"SourceOptions(revision={self.revision!r}, cache_dir={self.cache_dir!r})"
