"""The pages: a few files that are read once and served from memory, under a policy that lets nothing else in.

`static/` holds them as they are: HTML, CSS and small ES modules, no build step. What they show comes from models and
from strangers, so browsers are told to run and load only what this gateway serves, and no script in markup at all.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGES: Final = {"/": "index.html", "/swarm": "swarm.html", "/slow": "slow.html"}
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
SECURITY: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Markup made from text passes DOMPurify or is refused by the browser itself.
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to be sent."""

    plain: bytes
    zipped: bytes
    etag: str
    media_type: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "PageFile":
        suffix = name[name.rindex(".") :]
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), etag, TYPES[suffix])

    def respond(self, request: Request) -> Response:
        """The file, or that the browser has it already: asked each time, so that an upgrade shows at once."""
        headers = {**SECURITY, "ETag": self.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.plain, media_type=self.media_type, headers=headers)
        return Response(self.zipped, media_type=self.media_type, headers={**headers, "Content-Encoding": "gzip"})


def page_routes() -> list[BaseRoute]:
    """`/`, `/swarm`, `/slow`, and what they are made of under `/assets/`."""
    known = read_files()
    assets = {f"/assets/{name}": file for name, file in known.items() if not name.endswith(".html")}
    pages = {path: known[name] for path, name in PAGES.items()}
    return [_route(path, file) for path, file in {**pages, **assets}.items()]


def read_files() -> Mapping[str, PageFile]:
    """Every file of the pages by its name, those of others under `vendor/`."""
    root = files("corolla.apps.gateway") / "static"
    found = {entry.name: entry for entry in root.iterdir() if entry.is_file()}
    found |= {f"vendor/{entry.name}": entry for entry in (root / "vendor").iterdir()}
    return {name: PageFile.of(name, entry.read_bytes()) for name, entry in found.items()}


def _route(path: str, file: PageFile) -> BaseRoute:
    async def send(request: Request) -> Response:
        return file.respond(request)

    return Route(path, send)
