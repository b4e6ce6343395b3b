"""hivemind's streams and DHT, imported alone: 0.1 s and no torch, in place of 2 s with its training code.

hivemind's packages import everything from their `__init__`. While its modules load, three of those packages are
stood in for by empty ones that look names up in the submodules; afterwards everything is taken out of
`sys.modules` again, so that a program that uses hivemind itself gets its own, whole copy. This leans on the
layout of hivemind 1.1.12; with another layout the ordinary import is taken.

The only door to hivemind: whatever is untyped there stays `Any` here and is narrowed by the caller.
"""

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from corolla.errors import BadInput

log = logging.getLogger(__name__)

_BARE: Final[Mapping[str, tuple[str, ...]]] = {
    "hivemind": (),
    "hivemind.utils": ("logging", "asyncio", "timed_storage", "serializer"),
    "hivemind.dht": (),
}
"""Packages loaded without their `__init__`, and the submodules that hold the names it would have offered."""

_ADDRESS_CODECS: Final = ("cid", "domain", "fspath", "ip4", "ip6", "uint16be", "utf8")

_importing = threading.Lock()

_LAYOUT: Final = (
    *("p2p/p2p_daemon.py", "p2p/servicer.py", "dht/node.py", "dht/protocol.py", "dht/storage.py"),
    *(f"utils/{name}.py" for name in _BARE["hivemind.utils"]),
)


@dataclass(frozen=True, slots=True)
class Hivemind:
    """The names in use, by hivemind's own spelling."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    DHTID: Any
    DictionaryDHTValue: Any
    p2pd_pb2: Any
    dht_pb2: Any
    call_errors: tuple[type[Exception], ...]
    """What a call to another peer's DHT node raises when it fails there, on the way, or in being understood."""


def hivemind() -> Hivemind:
    """Import once and keep; from any thread."""
    with _importing:
        return _hivemind()


@lru_cache(maxsize=1)
def _hivemind() -> Hivemind:
    """The process's logging is left as it was (hivemind renames WARNING and adds a handler)."""
    with _logging_kept():
        if "hivemind" in sys.modules or not _has_known_layout(package_dir()):
            return _import_names()
        try:
            with _bare_packages(package_dir()):
                return _import_names()
        except (ImportError, AttributeError) as fault:
            log.debug("hivemind's layout is not as known; importing all of it", extra={"fault": str(fault)})
            return _import_names()


@lru_cache(maxsize=1)
def package_dir() -> Path:
    """Where hivemind is installed, found without importing it."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput("the package hivemind is not installed: run `pip install hivemind`")
    return Path(spec.submodule_search_locations[0])


def _import_names() -> Hivemind:
    def module(name: str) -> Any:
        return importlib.import_module(f"hivemind.{name}")

    for codec in _ADDRESS_CODECS:  # else imported when first used, and all of hivemind with them
        module("utils.multiaddr.codecs").codec_by_name(codec)
    return Hivemind(
        P2P=module("p2p.p2p_daemon").P2P,
        PeerID=module("p2p.p2p_daemon_bindings.datastructures").PeerID,
        Multiaddr=module("utils.multiaddr").Multiaddr,
        DHTNode=module("dht.node").DHTNode,
        DHTID=module("dht.routing").DHTID,
        DictionaryDHTValue=module("dht.storage").DictionaryDHTValue,
        p2pd_pb2=module("proto.p2pd_pb2"),
        dht_pb2=module("proto.dht_pb2"),
        call_errors=(
            module("p2p.p2p_daemon_bindings.utils").P2PDaemonError,
            module("p2p.p2p_daemon_bindings.utils").P2PHandlerError,
            importlib.import_module("google.protobuf.message").DecodeError,
        ),
    )


def _has_known_layout(base: Path) -> bool:
    return all((base / name).is_file() for name in _LAYOUT)


@contextmanager
def _bare_packages(base: Path) -> Iterator[None]:
    """Stand in for hivemind's packages; leave no trace in `sys.modules`, whatever happens."""
    for name, submodules in _BARE.items():
        sys.modules[name] = _bare_package(name, base.joinpath(*name.split(".")[1:]), submodules)
    try:
        yield
    finally:
        for name in [name for name in list(sys.modules) if name == "hivemind" or name.startswith("hivemind.")]:
            del sys.modules[name]


def _bare_package(name: str, path: Path, submodules: tuple[str, ...]) -> ModuleType:
    def look_up(attribute: str) -> Any:
        for submodule in () if attribute.startswith("__") else submodules:
            found = importlib.import_module(f"{name}.{submodule}")
            if hasattr(found, attribute):
                return getattr(found, attribute)
        raise AttributeError(attribute)

    package = ModuleType(name)
    spec = importlib.util.spec_from_loader(name, loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(path)]
    package.__spec__ = spec
    package.__path__ = [str(path)]
    vars(package)["__getattr__"] = look_up
    return package


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undo what importing hivemind does to the whole process's logging (its messages go the ordinary way)."""
    theirs = logging.getLogger("hivemind")
    name, level, handlers, propagate = (
        logging.getLevelName(logging.WARNING),
        theirs.level,
        list(theirs.handlers),
        theirs.propagate,
    )
    try:
        yield
    finally:
        logging.addLevelName(logging.WARNING, name)
        theirs.handlers[:] = handlers
        theirs.propagate = propagate
        theirs.setLevel(level)
