"""The user's cache directory: what downloads and conversions leave, under a cap, shared by all processes here.

    hub/OWNER--NAME/COMMIT/     files of a hub's repository, of some only parts (`cached_file.py`)
    gguf/KEY/NAME/              a converted GGUF model, whole (`build_once`)
    locks/                      who uses what; never removed

Nothing is removed unless the cap asks for it; then what was used longest ago goes first. Whoever uses something holds
its lock, shared; to remove it takes the lock exclusively, so what a living process uses stays.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from corolla.errors import BadInput
from corolla.models.locks import Lock, try_lock, wait_for_lock
from corolla.models.transfer import megabytes

BUILD_TIMEOUT_S: Final = 1800.0
"""A build downloads 100 MB or converts gigabytes; a second one may as well wait for it."""
USE_TIMEOUT_S: Final = 60.0
"""Only a removal stands in the way of a use, and that takes a moment."""

PARTIAL: Final = ".partial-"
"""Part of the name of a directory that is still being built."""

Say = Callable[[str], None]
"""Takes a sentence for the user about what is being done."""


def user_cache() -> Path:
    """Where this user's programs keep what they can make again, for corolla."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "corolla"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "corolla"


def build_once(target: Path, build: Callable[[Path], None], say: Say) -> Path:
    """`target`, after `build(empty directory)` made it, unless it was there.

    The directory becomes `target` by a rename once `build` returns, so what is there is whole. Only one process
    builds; others wait. What a killed build left behind goes with the next one.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(target, say):
        if target.is_dir():
            return target
        _remove_leftovers(target)
        partial = Path(tempfile.mkdtemp(prefix=target.name + PARTIAL, dir=target.parent))
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _only_builder(target: Path, say: Say) -> Lock:
    path = target.with_name(f"{target.name}.lock")
    lock = try_lock(path)
    if lock is None:
        say(f"another process is preparing {target}; waiting for it")
        lock = wait_for_lock(path, timeout_s=BUILD_TIMEOUT_S)
    return lock


def _remove_leftovers(target: Path) -> None:
    """Called under the lock, so every partial directory belongs to a build that is dead."""
    for leftover in target.parent.glob(f"{target.name}{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that can be removed as a whole: one large file, or a model's directory."""

    lock: Path
    paths: tuple[Path, ...]
    num_bytes: int
    used_at: float
    """When its lock was last taken to use it, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class DiskCache:
    """The cache directory `root`, holding at most `max_bytes` of downloads and conversions (None: no cap)."""

    root: Path = field(default_factory=user_cache)
    max_bytes: int | None = None

    def lock_path(self, *words: str) -> Path:
        """The lock file of the thing that these words name; no word contains `@`."""
        return self.root / "locks" / "@".join(words)

    def use(self, *words: str) -> Lock:
        """Keep the named thing from being removed until the lock is closed, and count it as used now."""
        lock = wait_for_lock(self.lock_path(*words), is_shared=True, timeout_s=USE_TIMEOUT_S)
        os.utime(lock.path)
        return lock

    def reserve(self, num_bytes: int, what: str, take: Callable[[], None]) -> None:
        """Make room for `num_bytes`, then let `take` claim it, before another process counts.

        Raises BadInput when that much cannot be had.
        """
        if self.max_bytes is None:
            return take()
        with wait_for_lock(self.lock_path("room"), timeout_s=USE_TIMEOUT_S):
            self._make_room(num_bytes, self.max_bytes, what)
            take()
        return None

    def _make_room(self, num_bytes: int, max_bytes: int, what: str) -> None:
        entries = self.entries()
        used = sum(entry.num_bytes for entry in entries)
        for entry in sorted(entries, key=lambda entry: entry.used_at):
            if used + num_bytes <= max_bytes:
                return
            if _remove(entry):
                used -= entry.num_bytes
        if used + num_bytes > max_bytes:
            raise BadInput(
                f"{what} does not fit into {self.root}: {megabytes(used + num_bytes)} MB would be in use, at most "
                f"{megabytes(max_bytes)} MB may be"
            )

    def entries(self) -> list[Entry]:
        """All that is there and may be removed when nobody uses it."""
        found: list[Entry] = []
        for snapshot in sorted((self.root / "hub").glob("*/*/")):
            found += self._entries_of(snapshot)
        for directory in sorted((self.root / "gguf").glob("*/")):
            key, dash, _ = directory.name.partition(PARTIAL)
            lock = directory.with_name(f"{key}.lock") if dash else self.lock_path("gguf", key)
            found.append(Entry(lock, (directory,), disk_bytes(directory), _used_at(lock)))
        return found

    def _entries_of(self, snapshot: Path) -> list[Entry]:
        """The large files of a snapshot one by one, then the directory with all the small ones.

        The directory's lock is held by everybody who uses any of its files: the last to go is safe to remove whole.
        """
        words = ("hub", snapshot.parent.name, snapshot.name)
        large: list[Entry] = []
        for path in sorted(snapshot.glob("*.safetensors")):
            lock = self.lock_path(*words, path.name)
            large.append(Entry(lock, (journal_of(path), path), disk_bytes(path), _used_at(lock)))
        lock = self.lock_path(*words)
        rest = disk_bytes(snapshot) - sum(entry.num_bytes for entry in large)
        last = max([_used_at(lock), *(entry.used_at for entry in large)])
        return [*large, Entry(lock, (snapshot,), rest, last)]


def journal_of(file: Path) -> Path:
    """Where it is written down which bytes of a cached file are there."""
    return file.parent / ".held" / file.name


def disk_bytes(path: Path) -> int:
    """What a file, or all below a directory, takes on the disk; holes in sparse files take nothing."""
    try:
        if path.is_dir():
            return sum(disk_bytes(entry) for entry in path.iterdir())
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # another process has just removed it
        return 0


def _remove(entry: Entry) -> bool:
    """Remove it unless somebody uses it."""
    lock = try_lock(entry.lock)
    if lock is None:
        return False
    with lock:
        for path in entry.paths:
            remove_path(path)
    return True


def remove_path(path: Path) -> None:
    """Remove a file or a directory with all that is in it; fine when there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _used_at(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0
