"""Locks between processes of one machine. The system gives one back when its holder dies, however it dies.

A lock file is never removed: whoever waited on a removed one would hold a lock that nobody else sees.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from corolla.errors import SwarmError

POLL_S = 0.1


class Lock:
    """One lock that is held; as a context manager, gives it back at the end of the block."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def try_make_exclusive(self) -> bool:
        """Turn a shared lock into an exclusive one; when others share it, False, and it may be lost."""
        return _try_flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def try_lock(path: Path, *, is_shared: bool = False) -> Lock | None:
    """The lock, if it is free now. Its file's modification time then says when it was last taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _try_flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX):
        os.close(descriptor)
        return None
    return Lock(path, descriptor)


def wait_for_lock(
    path: Path, *, is_shared: bool = False, timeout_s: float, on_wait: Callable[[float], None] = lambda _seconds: None
) -> Lock:
    """The lock, once it is free. `on_wait` is told at every look how long that has taken.

    Raises SwarmError when it is not free within `timeout_s`.
    """
    began = time.monotonic()
    while (lock := try_lock(path, is_shared=is_shared)) is None:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise SwarmError(f"another process has held {path} for {timeout_s / 60:.0f} minutes")
        on_wait(waited_s)
        time.sleep(POLL_S)
    return lock


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
