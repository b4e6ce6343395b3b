"""One file of a hub's repository in the cache, of which perhaps only some byte ranges are there.

It has its full size from the start and takes disk space only where bytes have come (a sparse file). A journal beside it
says which ranges those are: a line `START END` is added once the bytes are safely on the disk, so what is written there
is true even after a crash, and a download goes on where it broke off.
"""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from corolla.models.disk_cache import journal_of
from corolla.models.ranges import Range, merge

CHECKED: Final = "checked"
"""The journal's line for a whole file whose checksum was right."""

_CANNOT_RESERVE: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""How a file system says that it knows no such thing."""

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file at `path` that has `size` bytes when it is whole."""

    path: Path
    size: int

    def held(self) -> list[Range]:
        """The ranges that are there."""
        return self._read_journal()[0]

    def is_whole(self) -> bool:
        return self.held() == merge([(0, self.size)])

    def is_checked(self) -> bool:
        """Whether it is whole and its checksum was found right."""
        return self._read_journal()[1]

    def mark_checked(self) -> None:
        with journal_of(self.path).open("a") as journal:
            journal.write(f"{CHECKED}\n")

    def remove(self) -> None:
        """The journal goes first: bytes without a journal are no bytes."""
        journal_of(self.path).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read_journal(self) -> tuple[list[Range], bool]:
        try:
            size, content = self.path.stat().st_size, journal_of(self.path).read_text(errors="replace")
        except FileNotFoundError:
            return [], False
        if size != self.size:
            return [], False
        lines = content.split("\n")[:-1]  # what a crash cut off has no line end
        ranges = [_parse(line) for line in lines if line != CHECKED]
        held = merge((start, min(end, size)) for start, end in ranges)
        return held, CHECKED in lines


def _parse(line: str) -> Range:
    """A line's range; an empty one for anything else, as a damaged disk may leave."""
    words = line.split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(word.isdecimal() for word in words) else (0, 0)


class Writer:
    """Puts bytes into a cached file. Several may write at once, other processes' too, to ranges of their own."""

    def __init__(self, file: CachedFile) -> None:
        self.file = file
        journal = journal_of(file.path)
        journal.parent.mkdir(parents=True, exist_ok=True)
        self._data = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self._data).st_size != file.size:  # new, or damaged: what the journal says is void
            os.ftruncate(self._journal, 0)
            os.ftruncate(self._data, file.size)

    def reserve(self, ranges: Iterable[Range]) -> None:
        """Take the disk space now, where the system can: a full disk is found out before anything is downloaded."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            for start, end in ranges:
                os.posix_fallocate(self._data, start, end - start)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise

    def write(self, start: int, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._data, rest, start)
            start, rest = start + written, rest[written:]

    def record(self, start: int, end: int) -> None:
        """Note that the bytes of this range are there, once they are."""
        _sync(self._data)
        os.write(self._journal, f"{start} {end}\n".encode())

    def close(self) -> None:
        os.close(self._data)
        os.close(self._journal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
