"""A hub on this machine, for tests: serves model directories as the real one does, and fails in whatever way is asked.

It answers what `huggingface_hub` asks for a model's file list, and serves small files itself and large ones by a
redirect to a second address, as a CDN. Both know byte ranges. Every request is noted with the bytes that were sent.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_LARGE: Final = (".safetensors", ".gguf", ".bin")
_CHUNK: Final = 1 << 16


@dataclass(slots=True)
class Request:
    """One request, and what became of it."""

    path: str
    headers: dict[str, str]
    part: tuple[int, int] | None
    """The byte range that it asked for."""
    sent_bytes: int = 0
    status: int = 0

    @property
    def file(self) -> str:
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to an answer instead of the right thing."""

    status: int | None = None
    """This status, with no content."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Added to the answer, or put in place of what it has."""
    most_bytes: int | None = None
    """The connection breaks after so many bytes of content."""
    ignores_range: bool = False
    content: Callable[[bytes], bytes] | None = None
    """Changes the content."""
    before: Callable[[], object] | None = None
    """Called first: a place to wait."""


Faults = Callable[[Request], Fault | None]


class LocalHub:
    """Repositories by name, each a directory. `fault` is asked before every answer."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.token = "hf_right"  # noqa: S105 - of this hub only
        self.requests: list[Request] = []
        self.fault: Faults = lambda _request: None
        self.endpoint = ""
        self.cdn = ""

    def commit_of(self, name: str) -> str:
        """Changes with every change of a file."""
        digest = hashlib.sha1(usedforsecurity=False)
        for file in self._files(name):
            digest.update(f"{file.name} {file.stat().st_size} {_sha256(file)}\n".encode())
        return digest.hexdigest()

    def sent_bytes(self, suffix: str = ".safetensors") -> int:
        """How many bytes of files with this ending were sent."""
        return sum(request.sent_bytes for request in list(self.requests) if request.path.endswith(suffix))

    def describe(self, name: str) -> dict[str, object]:
        """What the hub's API says of a repository."""
        siblings = [_describe(file) for file in self._files(name)]
        return {"id": name, "sha": self.commit_of(name), "gated": name in self.gated, "siblings": siblings}

    def _files(self, name: str) -> list[Path]:
        return sorted(file for file in self.repositories[name].iterdir() if file.is_file())


@contextmanager
def run_local_hub() -> Generator[LocalHub]:
    """A hub that answers until the block ends."""
    hub = LocalHub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, is_cdn=is_cdn)) for is_cdn in (False, True)]
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def _handler(hub: LocalHub, *, is_cdn: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub, Handler.is_cdn = hub, is_cdn
    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    is_cdn: bool
    protocol_version = "HTTP/1.1"
    request_now: Request
    fault_now: Fault

    def log_message(self, format: str, *args: object) -> None:
        """Silence: the requests are noted."""

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        request = Request(path, {name.lower(): value for name, value in self.headers.items()}, _range(self.headers))
        self.request_now = request
        self.hub.requests.append(request)
        self.fault_now = self.hub.fault(request) or Fault()
        if self.fault_now.before is not None:
            self.fault_now.before()
        if self.fault_now.status is not None:
            return self._answer(self.fault_now.status, b"")
        return self._route(path)

    def _route(self, path: str) -> None:
        if self.is_cdn:
            _, owner, name, file = path.split("/")
            return self._send_file(self.hub.repositories[f"{owner}/{name}"] / file)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self._describe(*found.groups())
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        return self._answer(404, b"")

    def _describe(self, name: str, revision: str) -> None:
        if name not in self.hub.repositories:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.hub.commit_of(name)):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return self._answer(200, json.dumps(self.hub.describe(name)).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        path = self.hub.repositories[name] / file
        if name in self.hub.gated and self.request_now.headers.get("authorization") != f"Bearer {self.hub.token}":
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if revision != self.hub.commit_of(name) or not path.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if path.suffix in _LARGE:
            return self._answer(302, b"", {"Location": f"{self.hub.cdn}/{name}/{file}"})
        return self._send_file(path)

    def _send_file(self, path: Path) -> None:
        part, size = self.request_now.part, path.stat().st_size
        if part is None or self.fault_now.ignores_range:
            return self._answer(200, path.read_bytes())
        start, end = part[0], min(part[1], size)
        if start >= end:
            return self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        return self._answer(206, content, {"Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        fault = self.fault_now
        content = content if fault.content is None else fault.content(content)
        self.request_now.status = status
        self.send_response(status)
        said = {"Content-Length": str(len(content))} | (headers or {}) | fault.headers
        if said.get("Transfer-Encoding") == "chunked":
            del said["Content-Length"]
            content = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
        for name, value in said.items():
            self.send_header(name, value)
        self.end_headers()
        most = len(content) if fault.most_bytes is None else min(fault.most_bytes, len(content))
        for start in range(0, most, _CHUNK):
            chunk = content[start : min(start + _CHUNK, most)]
            try:
                self.wfile.write(chunk)
            except ConnectionError:  # the client had enough
                self.close_connection = True
                return
            self.request_now.sent_bytes += len(chunk)
        if most < len(content) or fault.headers.get("Content-Length"):
            self.close_connection = True


def _range(headers: object) -> tuple[int, int] | None:
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", str(getattr(headers, "get", dict[str, str]().get)("Range", "")))
    return (int(found[1]), int(found[2]) + 1) if found else None


def _describe(file: Path) -> dict[str, object]:
    size = file.stat().st_size
    if file.suffix in _LARGE:
        lfs = {"size": size, "sha256": _sha256(file), "pointerSize": 134}
        return {"rfilename": file.name, "size": size, "blobId": "0" * 40, "lfs": lfs}
    blob = hashlib.sha1(f"blob {size}\0".encode() + file.read_bytes(), usedforsecurity=False)
    return {"rfilename": file.name, "size": size, "blobId": blob.hexdigest()}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
