"""Between server and endpoints: who asks, how much they may send and how long that may take; errors and counts.

Logs say method, path, status and time; nothing of what was asked or answered.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corolla.apps.gateway.errors import ApiError, as_api_error
from corolla.apps.gateway.gateway import Gateway
from corolla.clock import loop_time

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/openapi.json"})
"""Answered without a key: they say nothing of anybody."""
GUARDED: Final = ("/v1/", "/api/", "/metrics")
MAX_HEADER_CHARS: Final = 512


class Guard:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = loop_time(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, counted)
        except ClientDisconnect:
            log.info("caller gone", extra={"path": _short(scope["path"])})
        except Exception as error:
            if status:
                raise
            answer = _as_told(error, scope) if isinstance(error, HTTPException) else as_api_error(error)
            self._gateway.metrics.refusals.labels(answer.code or str(answer.status)).inc()
            await answer.response()(scope, receive, counted)
        finally:
            self._gateway.metrics.requests.labels(_endpoint(scope), str(status or 499)).inc()
            log.info(
                "request",
                extra={
                    "method": _short(scope["method"]), "path": _short(scope["path"]), "status": status or 499,
                    "seconds": round(loop_time() - began, 3),
                },
            )  # fmt: skip

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        self._check_host(request)
        if scope["path"].startswith(GUARDED):
            scope.setdefault("state", {})["key"] = self._key(request)
        config = self._gateway.config
        _check_length(request, config.max_body_bytes)
        scope["app"] = self  # for Starlette: errors are raised, not answered in its own way
        await self._app(scope, _bounded(receive, config.max_body_bytes, config.body_timeout_s), send)

    def _check_host(self, request: Request) -> None:
        hosts = self._gateway.config.hosts
        if hosts is None:
            return
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.lower() not in hosts:
            raise ApiError(
                421, f"this gateway is not called {host[:64]!r}; it answers to {', '.join(hosts)}", "wrong_host"
            )

    def _key(self, request: Request) -> object:
        kind, _, presented = request.headers.get("authorization", "").partition(" ")
        given = presented.strip() if kind.lower() == "bearer" and len(presented) <= MAX_HEADER_CHARS else None
        key = self._gateway.config.keys.find(given or None)
        if key is None:
            said = "that is no API key of this gateway" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, said, "invalid_api_key")
        return key


def _as_told(error: HTTPException, scope: Scope) -> ApiError:
    """What an endpoint said; or the router, which knows no more than that there is no such path, or method for it."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    is_routers = error.detail == HTTPStatus(error.status_code).phrase
    said = f"there is no {_short(scope['method'])} {_short(scope['path'])} here" if is_routers else error.detail
    return ApiError(error.status_code, said, code, headers=dict(error.headers or {}))


def _check_length(request: Request, most: int) -> None:
    said = request.headers.get("content-length", "0")
    if not said.isdigit() or int(said[:20]) > most:
        raise _too_large(most)


def _bounded(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    """`receive`, for a body of so many bytes within that time. What comes after it (hanging up) may take any time."""
    received, is_whole, deadline = 0, False, loop_time() + timeout_s

    async def bounded() -> Message:
        nonlocal received, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout(deadline - loop_time()):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive within {timeout_s:g} s", "request_timeout") from None
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > max_bytes:
                raise _too_large(max_bytes)
        return message

    return bounded


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is too large: {most} bytes at most", "request_too_large")


def _endpoint(scope: Scope) -> str:
    """The path's pattern, so that labels stay few."""
    path = scope["path"]
    if "endpoint" not in scope:  # no route took it
        return "other"
    for beginning in ("/v1/models", "/api/v1"):
        if path.startswith(beginning):
            return beginning
    return path if len(path) <= 64 and not scope.get("path_params") else "other"


def _short(text: str) -> str:
    return text if len(text) <= 128 else f"{text[:128]}…"
