"""The user's cache directory, and things built into it once: whole or not at all, also when two builds meet."""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from corolla.errors import SwarmError

LOCK_POLL_S = 0.2
LOCK_TIMEOUT_S = 1800.0
"""A build downloads 100 MB; on a poor line that takes a while, and a second one may as well wait for it."""

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
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _only_builder(target: Path, say: Say) -> Generator[None]:
    """Hold the lock beside `target`; the system gives it back when its holder dies, however it dies."""
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        is_waiting = False
        while not _try_lock(lock.fileno()):
            if not is_waiting:
                say(f"another process is preparing {target}; waiting for it")
                is_waiting = True
            if time.monotonic() > deadline:
                raise SwarmError(f"another process has held {lock.name} for {LOCK_TIMEOUT_S / 60:.0f} minutes")
            time.sleep(LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(target: Path) -> None:
    """Called under the lock, so every partial directory belongs to a build that is dead."""
    for leftover in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
