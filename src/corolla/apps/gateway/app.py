"""The ASGI application of a gateway: endpoints, and what stands in front of them."""

from collections.abc import Callable, Sequence

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from corolla.apps.gateway.gateway import Gateway
from corolla.apps.gateway.middleware import Guard
from corolla.apps.gateway.openai import OpenAiApi
from corolla.apps.gateway.openapi import describe
from corolla.ids import PeerId

Silent = Callable[[], frozenset[PeerId]]
"""Servers that are announced and do not answer, as last seen."""


def create_app(gateway: Gateway, pages: Sequence[BaseRoute] = (), silent: Silent = frozenset) -> ASGIApp:
    """`pages`: further routes (the chat and swarm pages, `/api/v1/…`). `silent`: whom `/ready` does not count on."""
    routes = [*OpenAiApi(gateway).routes(), *_operations(gateway, silent), *pages]
    guarded = Guard(Router(routes), gateway)
    if not gateway.config.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(gateway.config.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )


def _operations(gateway: Gateway, silent: Silent) -> list[Route]:
    async def health(_request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def ready(_request: Request) -> Response:
        lacking = await gateway.lacking(silent())
        is_ready = len(lacking) < len(gateway.models)
        content = {"status": "ready" if is_ready else "not ready", "lacking": lacking}
        return Response(msgspec.json.encode(content), 200 if is_ready else 503, media_type="application/json")

    async def metrics(_request: Request) -> Response:
        return Response(gateway.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    description = msgspec.json.encode(describe())

    async def openapi(_request: Request) -> Response:
        return Response(description, media_type="application/json")

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]
