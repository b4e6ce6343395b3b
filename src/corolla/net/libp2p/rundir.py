"""A private directory for one transport's sockets, gone when its process is.

Whoever can open the daemon's control socket speaks as this peer, so the directory is ours alone (0700). A killed
process leaves its directory behind; the next one to start sees that nobody holds the lock in it, and clears it.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from corolla.errors import BadInput

_LOCK: Final = "lock"
_MAX_SOCKET_PATH: Final = 100
"""A unix socket's path has 108 bytes on Linux and 104 on macOS."""
_SETTLED_S: Final = 60.0
"""Younger directories are left alone: their process may be about to take the lock."""


@contextmanager
def run_dir(base: Path | None = None) -> Iterator[Path]:
    """A fresh directory under `base` (a per-user one in the system's temporary directory), removed at the end.

    Raises BadInput when it cannot be made, or when somebody else owns the place.
    """
    base = _default_base() if base is None else base
    path = base / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _make_private(base)
        _clear_dead(base)
        path.mkdir(mode=0o700)
        lock = _take_lock(path)
    except OSError as fault:
        raise BadInput(f"cannot use {base} for sockets: {fault.strerror or fault}") from fault
    assert lock is not None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _default_base() -> Path:
    name = f"corolla-{os.getuid()}"
    usual = Path(tempfile.gettempdir()) / name
    return usual if len(os.fsencode(usual)) < _MAX_SOCKET_PATH - 40 else Path("/tmp") / name  # noqa: S108 (made private)


def _make_private(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BadInput(f"{base} is not a directory of this user alone: remove it, or run `chmod 700 {base}`")


def _clear_dead(base: Path) -> None:
    for path in base.iterdir():
        lock = _take_lock(path) if _is_settled(path) else None
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _is_settled(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _SETTLED_S
    except FileNotFoundError:
        return False


def _take_lock(path: Path) -> int | None:
    """A held lock, or None when a living process holds it. The system lets go of it when its process dies."""
    try:
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None  # cleared by another process in this moment, or not ours
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
