"""The files of a hub's repository, as a directory that fills up with what is held.

A repository is looked up once per opening, so that a branch means what it means today; its commit's files never
change and are kept in the disk cache. When the hub cannot be reached, what it said last still stands.
"""

import hashlib
import logging
import secrets
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from corolla.errors import BadInput
from corolla.models.cached_file import CachedFile
from corolla.models.disk_cache import DiskCache
from corolla.models.download import DiskFull, Download, Wanted
from corolla.models.hub import Hub, RemoteFile, Repository, Unreachable, is_commit
from corolla.models.locks import Lock, wait_for_lock
from corolla.models.ranges import Range, count_bytes, subtract
from corolla.models.transfer import Progress, Transfer

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S: Final = 600.0
"""Hashing a shard takes seconds."""
_TICK_S: Final = 0.2
_LISTING: Final = ".listing.json"


class HubFiles:
    """The files of one commit. Keeps them from being removed for as long as it lives."""

    def __init__(self, repository: Repository, hub: Hub, cache: DiskCache, progress: Progress) -> None:
        self._repository = repository
        self._hub = hub
        self._cache = cache
        self._progress = progress
        self.directory = _folder(cache, repository.name) / repository.commit
        self._lock_words = ("hub", self.directory.parent.name, repository.commit)
        weakref.finalize(self, cache.use(*self._lock_words).close)
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        return self._repository.name

    @property
    def commit(self) -> str:
        return self._repository.commit

    @property
    def file_names(self) -> list[str]:
        return sorted(self._repository.files)

    def size_of(self, file: str) -> int | None:
        remote = self._repository.files.get(file)
        return None if remote is None else remote.size

    def lacks(self, ranges: Mapping[str, Sequence[Range]]) -> int:
        return sum(
            count_bytes(subtract(parts, CachedFile(self.directory / name, self._repository.files[name].size).held()))
            for name, parts in ranges.items()
        )

    @contextmanager
    def hold(self, ranges: Mapping[str, Sequence[Range]]) -> Generator[None]:
        """Raises BadInput or SwarmError, also when a whole file has another checksum than the hub says."""
        with ExitStack() as stack:
            wanted = [self._want(name, parts) for name, parts in ranges.items()]
            locks = [stack.enter_context(self._cache.use(*want.lock_words)) for want in wanted]
            self._download(wanted, locks)
            if wrong := [want.file.path for want in wanted if not self._is_right(want)]:
                raise BadInput(f"{wrong[0]}: is not what {self._hub.endpoint} promises by its checksum; removed")
            yield

    def _want(self, name: str, ranges: Sequence[Range]) -> Wanted:
        file = CachedFile(self.directory / name, self._repository.files[name].size)
        return Wanted(file, (*self._lock_words, name), ranges)

    def _download(self, wanted: list[Wanted], locks: list[Lock]) -> None:
        config = self._hub.config
        download = Download(
            self._cache,
            self.name,
            lambda file, part, pause: self._hub.stream(self._repository, file, part, pause),
            self._progress,
            connections=config.connections,
            piece_bytes=config.piece_bytes,
        )
        try:
            download.run(wanted)
        except BaseException as error:
            for want, lock in zip(wanted, locks, strict=True):
                if not _is_worth_keeping(want.file, error) and lock.try_make_exclusive():
                    want.file.remove()
            raise

    def _is_right(self, want: Wanted) -> bool:
        """Whether a file that is whole has the hub's checksum; looked at once. What has not is removed."""
        if want.file.is_checked() or not want.file.is_whole():
            return True
        with wait_for_lock(self._cache.lock_path(*want.lock_words, "check"), timeout_s=CHECK_TIMEOUT_S):
            if want.file.is_checked():
                return True
            if not _has_checksum(want.file.path, self._repository.files[want.file.path.name]):
                want.file.remove()
                return False
            want.file.mark_checked()
            return True


def _is_worth_keeping(file: CachedFile, error: BaseException) -> bool:
    """Whether a later download can go on from what is there. Small files come whole or not at all."""
    if file.is_whole():
        return True
    return bool(file.held()) and file.path.suffix == ".safetensors" and not isinstance(error, DiskFull)


def _has_checksum(path: Path, remote: RemoteFile) -> bool:
    """True also when the hub gives no checksum."""
    with path.open("rb") as file:
        if remote.sha256 is not None:
            return hashlib.file_digest(file, "sha256").hexdigest() == remote.sha256
        if remote.git_sha1 is None:
            return True
        digest = hashlib.sha1(f"blob {remote.size}\0".encode(), usedforsecurity=False)  # git's name for a file
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest() == remote.git_sha1


def open_repository(name: str, revision: str, hub: Hub, cache: DiskCache, progress: Progress) -> HubFiles:
    """The repository's files at a branch, tag or commit.

    Raises BadInput when there is no such thing for us, SwarmError when the hub cannot be asked and never was.
    """
    repository = _resolve(name, revision, hub, cache, progress)
    files = HubFiles(repository, hub, cache, progress)
    _write(files.directory / _LISTING, msgspec.json.encode(repository))
    _write(_reference(cache, name, revision), repository.commit.encode())
    return files


def _resolve(name: str, revision: str, hub: Hub, cache: DiskCache, progress: Progress) -> Repository:
    known = _last_known(name, revision, cache)
    if known is not None and is_commit(revision):
        return known  # a commit never changes: nobody needs to be asked
    try:
        return hub.look_up(name, revision, partial(_wait, name, progress), attempts=None if known is None else 1)
    except Unreachable as fault:
        if known is None:
            raise
        log.warning("the hub cannot be asked; what it said last stands", extra={"why": str(fault)})
        return known


def _wait(name: str, progress: Progress, seconds: float, why: str) -> None:
    """Sleep, but let the progress show it, and end it."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < seconds:
        progress(Transfer(name, 0, 0, waited_s, f"{why}; again in {seconds - waited_s:.0f} s"))
        time.sleep(min(_TICK_S, seconds - waited_s))


def _last_known(name: str, revision: str, cache: DiskCache) -> Repository | None:
    try:
        commit = revision if is_commit(revision) else _reference(cache, name, revision).read_text()
        return msgspec.json.decode((_folder(cache, name) / commit / _LISTING).read_bytes(), type=Repository)
    except (OSError, ValueError):  # never asked, removed since, or damaged
        return None


def _folder(cache: DiskCache, name: str) -> Path:
    return cache.root / "hub" / name.replace("/", "--")


def _reference(cache: DiskCache, name: str, revision: str) -> Path:
    return cache.root / "hub" / "references" / quote(f"{name}@{revision}", safe="")


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also when two processes write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:  # a full disk, as a rule: what is there of it would stay for good
        unfinished.unlink(missing_ok=True)
        raise
