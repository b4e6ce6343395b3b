"""A model's files, wherever they come from: a directory on this machine, or a hub (`hub_files.py`).

What reads them first holds the bytes that it needs, then reads ordinary local files. So headers, samples of the
fingerprint, a span's tensors and a client's embeddings go one way, and each source decides what holding takes.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corolla.models.ranges import Range


class ModelFiles(Protocol):
    """Files of one model, all directly in one directory."""

    @property
    def directory(self) -> Path:
        """Where they lie, or appear as they are held."""
        ...

    @property
    def name(self) -> str:
        """What people call the model."""
        ...

    @property
    def commit(self) -> str | None:
        """The hub's commit that the files belong to; None: they are from elsewhere."""
        ...

    def size_of(self, file: str) -> int | None:
        """Bytes of a whole file; None: the model has no such file."""
        ...

    def lacks(self, ranges: Mapping[str, Sequence[Range]]) -> int:
        """How many of these bytes would have to be downloaded first."""
        ...

    def hold(self, ranges: Mapping[str, Sequence[Range]]) -> AbstractContextManager[None]:
        """While inside, these bytes of these files can be read from `directory`. They lie within the file's size.

        Raises BadInput or SwarmError when they cannot be had.
        """
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LocalFiles:
    """A directory of the user's."""

    directory: Path
    commit: str | None = None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def size_of(self, file: str) -> int | None:
        path = self.directory / file
        return path.stat().st_size if path.is_file() else None

    def lacks(self, ranges: Mapping[str, Sequence[Range]]) -> int:
        return 0

    def hold(self, ranges: Mapping[str, Sequence[Range]]) -> AbstractContextManager[None]:
        return nullcontext()  # they are there
