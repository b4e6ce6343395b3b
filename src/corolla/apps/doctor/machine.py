"""What can be said of this machine and its files before anything is started."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from corolla.errors import BadInput
from corolla.net import identity as identities
from corolla.net.findings import Finding
from corolla.net.gate import GateConfig, load_allowed
from corolla.net.swarm_key import load_keys

ENOUGH_DISK_BYTES: Final = 5 << 30
"""A small model's span; the cap of the cache is the user's to choose."""
LEAST_DISK_BYTES: Final = 256 << 20
ENOUGH_MEMORY_BYTES: Final = 4 << 30
"""Python with torch takes half a gigabyte; a span of a few billion parameters the rest."""
LEAST_MEMORY_BYTES: Final = 512 << 20
_MEMINFO: Final = Path("/proc/meminfo")


def check_identity(path: Path | None) -> Finding:
    """Whether the key file, when there is one, can be used; none is made."""
    if path is None:
        return Finding(
            "identity", "ok", "no identity file: a new peer id at each start", "pass --identity FILE to keep one"
        )
    if not path.exists():
        return Finding("identity", "ok", f"{path} does not exist yet; it is made at the first start")
    try:
        return Finding("identity", "ok", f"{path} holds the key of {identities.load_or_create(path).peer}")
    except BadInput as wrong:
        return Finding("identity", "bad", str(wrong), "see above; or name another file")


def kept_identity(path: Path | None) -> identities.Identity | None:
    """The one that lists of peers know; None when there is none to be used, and none is made."""
    if path is None or not path.exists():
        return None
    try:
        return identities.load_or_create(path)
    except BadInput:  # as `check_identity` says
        return None


def check_key(keys: Sequence[Path], allow: Sequence[Path]) -> tuple[Finding, GateConfig | None]:
    """What the swarm key and the list of peers say, and both; None when a file cannot be used."""
    try:
        gate = GateConfig(keys=load_keys(keys), allowed=load_allowed(allow))
    except BadInput as wrong:
        return Finding("key", "bad", str(wrong), "see above; `corolla key new > FILE` makes a key"), None
    texts = [f"{len(gate.keys)} swarm key{'s' if len(gate.keys) > 1 else ''}"] if gate.keys else ["no swarm key: open"]
    texts += [f"{len(gate.allowed)} peers may dial this one"] if gate.allowed is not None else []
    if gate.allowed is not None and not gate.allowed:
        return Finding("key", "unsure", "the list of allowed peers is empty: nobody may dial", "add peer ids"), gate
    return Finding("key", "ok", "; ".join(texts)), gate


def check_disk(directory: Path) -> Finding:
    """Whether models can be kept where they are cached."""
    place = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as fault:
        return Finding(
            "disk", "bad", f"{place} cannot be used: {fault.strerror or fault}", "name another with --cache-dir"
        )
    if not os.access(place, os.W_OK):
        return Finding("disk", "bad", f"{place} cannot be written", "name a directory of yours with --cache-dir")
    return _judge_bytes("disk", free, ENOUGH_DISK_BYTES, LEAST_DISK_BYTES, f"in {directory}", "free some space")


def check_memory() -> Finding:
    """Whether a server has room for its blocks."""
    free = free_memory()
    if free is None:
        return Finding(
            "memory",
            "unsure",
            "this system does not say how much memory is free",
            "look it up in the system's own monitor, and pass --num-blocks for what fits",
        )
    return _judge_bytes(
        "memory",
        free,
        ENOUGH_MEMORY_BYTES,
        LEAST_MEMORY_BYTES,
        "of memory",
        "serve fewer blocks, or end other programs",
    )


def free_memory() -> int | None:
    """Bytes that programs may still take; None when the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) << 10 if found and len(found[0]) > 1 and found[0][1].isdigit() else None


def _judge_bytes(check: str, free: int, enough: int, least: int, where: str, cure: str) -> Finding:
    text = f"{free / (1 << 30):.1f} GB free {where}"
    if free >= enough:
        return Finding(check, "ok", text)
    return Finding(check, "bad" if free < least else "unsure", text, cure)
