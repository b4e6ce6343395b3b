"""Missing byte ranges of cached files, downloaded several at a time and by one process only.

Files are cut into slices of 256 MB; a slice's lock is held by the process that fills it, so that servers starting at
once on one machine share the work and the bytes instead of doubling them. Who holds a slice waits for nothing but the
hub. One thread of the caller's hands out slices and tells the progress; a few others download pieces of them.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from corolla.errors import BadInput, SwarmError
from corolla.models.cached_file import CachedFile, Writer
from corolla.models.disk_cache import DiskCache, journal_of
from corolla.models.locks import Lock, try_lock
from corolla.models.ranges import Range, count_bytes, split, subtract
from corolla.models.transfer import Progress, Transfer, megabytes

SLICE_BYTES: Final = 256 << 20
"""What one process holds against others: a client beside a loading server waits for this much, not for a shard."""
RECORD_BYTES: Final = 8 << 20
"""Lost at most, per connection, when the process is killed in mid-download."""
STALL_TIMEOUT_S: Final = 900.0
"""How long others may hold all slices that we wait for while nothing new arrives in them."""
_TICK_S: Final = 0.2
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Pause = Callable[[float, str], None]
Stream = Callable[[str, Range, Pause], Iterator[bytes]]
"""Bytes of a file's range, given a way to wait."""


class DiskFull(BadInput):
    """The disk filled up in mid-download."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Ranges of one file that must be there."""

    file: CachedFile
    lock_words: tuple[str, ...]
    """What the file is called in the cache's locks."""
    ranges: Sequence[Range]

    def slices(self) -> "list[Slice]":
        """What is missing, by the slices that it lies in."""
        missing = subtract(self.ranges, self.file.held())
        numbers = {number for start, end in missing for number in range(start // SLICE_BYTES, _up(end))}
        return [Slice(self, number) for number in sorted(numbers)]


def _up(end: int) -> int:
    return -(-end // SLICE_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """The part of a file that one lock covers."""

    wanted: Wanted
    number: int

    def missing(self) -> list[Range]:
        first, last = self.number * SLICE_BYTES, (self.number + 1) * SLICE_BYTES
        ranges = [(max(start, first), min(end, last)) for start, end in self.wanted.ranges]
        return subtract(ranges, self.wanted.file.held())


@dataclass(frozen=True, slots=True)
class _Filling:
    """A slice that this process fills now."""

    writer: Writer
    opened: ExitStack
    """Closes the writer, then gives back the slice's lock."""
    pieces: set[Future[None]]
    """Those that have not come yet."""


class _Ended(Exception):
    """Nobody wants the rest any more: another piece failed, or the caller had enough."""


@dataclass(slots=True)
class _Tally:
    """What the downloading threads tell the one that shows progress."""

    done_bytes: int = 0
    waiting: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.done_bytes += num_bytes
            self.waiting = ""


class Download:
    """One download; `run` does it."""

    def __init__(
        self, cache: DiskCache, what: str, stream: Stream, progress: Progress, *, connections: int, piece_bytes: int
    ) -> None:
        self._cache = cache
        self._what = what
        self._stream = stream
        self._progress = progress
        self._connections = connections
        self._piece_bytes = piece_bytes
        self._began = self._reported_at = time.monotonic()
        self._tally = _Tally()
        self._is_ended = threading.Event()
        self._waiting: dict[Slice, int] = {}
        """Slices that nobody fills for us yet, with the bytes that they lacked when we looked."""
        self._filling: list[_Filling] = []
        self._total_bytes = 0

    def run(self, wanted: Sequence[Wanted]) -> None:
        """Download what is missing. Raises BadInput (DiskFull) or SwarmError; what came until then is recorded."""
        self._waiting = {part: count_bytes(part.missing()) for want in wanted for part in want.slices()}
        self._total_bytes = sum(self._waiting.values())
        if not self._waiting:
            return
        self._check_disk()
        pool = ThreadPoolExecutor(self._connections, thread_name_prefix="download")
        try:
            self._fill_all(pool)
        except OSError as error:  # the network's are translated where it is: this one is the disk's
            raise self._disk_fault(error) from error
        finally:
            self._is_ended.set()
            pool.shutdown(cancel_futures=True)
            for filling in self._filling:
                filling.opened.close()
        self._report()

    def _fill_all(self, pool: ThreadPoolExecutor) -> None:
        stall = _Stall()
        while self._waiting or self._filling:
            self._start_free(pool)
            if self._filling:
                self._collect()
                stall = _Stall()
            elif self._waiting:
                self._tally.waiting = "another process downloads the same"
                stall.check(self._waiting)
                time.sleep(_TICK_S)
            self._report_sometimes()

    def _start_free(self, pool: ThreadPoolExecutor) -> None:
        """Take slices that no other process fills, as many as keep the connections busy."""
        for part in list(self._waiting):
            if len(self._filling) >= self._connections:
                return
            words = (*part.wanted.lock_words, str(part.number))
            lock = try_lock(self._cache.lock_path(*words))
            if lock is not None:
                self._start(part, lock, pool)

    def _start(self, part: Slice, lock: Lock, pool: ThreadPoolExecutor) -> None:
        with ExitStack() as opened:
            opened.enter_context(lock)
            missing = part.missing()  # now that nobody else fills it
            num_bytes = count_bytes(missing)
            self._total_bytes += num_bytes - self._waiting.pop(part)
            if not num_bytes:
                return
            writer = opened.enter_context(Writer(part.wanted.file))
            self._cache.reserve(num_bytes, self._what, partial(writer.reserve, missing))
            pieces = {pool.submit(self._fetch, writer, piece) for piece in split(missing, self._piece_bytes)}
            self._filling.append(_Filling(writer, opened.pop_all(), pieces))

    def _collect(self) -> None:
        """Wait a moment for pieces; let go of slices that are full. Raises what a piece raised."""
        pieces = [piece for filling in self._filling for piece in filling.pieces]
        done = wait(pieces, timeout=_TICK_S, return_when=FIRST_COMPLETED).done
        for piece in done:
            piece.result()
        for filling in list(self._filling):
            filling.pieces.difference_update(done)
            if not filling.pieces:
                filling.opened.close()
                self._filling.remove(filling)

    def _fetch(self, writer: Writer, piece: Range) -> None:
        """Download one piece, in a thread of the pool."""
        recorded = at = piece[0]
        try:
            for chunk in self._stream(writer.file.path.name, piece, self._pause):
                writer.write(at, chunk)
                at += len(chunk)
                self._tally.add(len(chunk))
                if at - recorded >= RECORD_BYTES:
                    writer.record(recorded, at)
                    recorded = at
                if self._is_ended.is_set():
                    raise _Ended
        finally:
            if at > recorded:
                writer.record(recorded, at)

    def _pause(self, seconds: float, why: str) -> None:
        self._tally.waiting = f"{why}; again in {seconds:.0f} s"
        if self._is_ended.wait(seconds):
            raise _Ended

    def _report_sometimes(self) -> None:
        if time.monotonic() - self._reported_at >= _TICK_S:
            self._report()

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        tally, seconds = self._tally, time.monotonic() - self._began
        self._progress(Transfer(self._what, tally.done_bytes, self._total_bytes, seconds, tally.waiting))

    def _check_disk(self) -> None:
        """Refuse what cannot fit before anything is downloaded."""
        most, free = self._cache.max_bytes, shutil.disk_usage(self._cache.root).free
        if most is not None and self._total_bytes > most:
            raise BadInput(
                f"{self._what} needs {megabytes(self._total_bytes)} MB in {self._cache.root}, which may hold "
                f"{megabytes(most)} MB at most"
            )
        if self._total_bytes > free:
            raise BadInput(self._no_room(free))

    def _disk_fault(self, error: OSError) -> SwarmError:
        if error.errno in _DISK_FULL:
            return DiskFull(self._no_room(shutil.disk_usage(self._cache.root).free))
        return BadInput(f"{error.filename or self._cache.root}: cannot be written: {error.strerror}")

    def _no_room(self, free: int) -> str:
        left = self._total_bytes - self._tally.done_bytes
        return (
            f"{self._what} needs {megabytes(left)} MB more on the disk of {self._cache.root}, which has "
            f"{megabytes(free)} MB free"
        )


class _Stall:
    """Watches slices that others fill."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._since = time.monotonic()

    def check(self, slices: dict[Slice, int]) -> None:
        """Raises SwarmError when nothing new has come for too long."""
        seen = [_size_of_journal(part.wanted.file) for part in slices]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > STALL_TIMEOUT_S:
            file = next(iter(slices)).wanted.file.path
            raise SwarmError(
                f"{file}: another process has been downloading it, to no effect, for {STALL_TIMEOUT_S:.0f} s"
            )


def _size_of_journal(file: CachedFile) -> int:
    try:
        return journal_of(file.path).stat().st_size
    except FileNotFoundError:
        return 0
