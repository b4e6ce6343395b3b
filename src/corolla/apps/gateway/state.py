"""The JSON behind the pages, for other programs too: the swarm now and as it changes, and recent answers.

    GET /api/v1/state          the swarm as last seen
    GET /api/v1/events         the same as server-sent events: now, and whenever it was looked at again
    GET /api/v1/traces         recent answers of the caller, the newest first
    GET /api/v1/traces/{id}    one of them, step by step

Who may ask is the gateway's business: `Authorize` gives the caller's name (empty where there are no keys) or raises.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from corolla import __version__
from corolla.apps.gateway import trace_facts
from corolla.apps.gateway.connections import run_until_gone
from corolla.apps.gateway.observer import Observer, SwarmState
from corolla.apps.gateway.traces import MAX_TRACES, TraceStore
from corolla.apps.status.facts import as_json

Authorize = Callable[[Request], Awaitable[str]]
"""The caller's name. Raises HTTPException for who may not ask."""

KEEP_ALIVE_S: Final = 15.0
"""A comment this often keeps proxies from closing a quiet stream, and tells us of readers that are gone."""
SEND_TIMEOUT_S: Final = 30.0
UNCACHED: Final = {"Cache-Control": "no-store"}


async def anybody(_request: Request) -> str:
    """For a gateway without keys."""
    return ""


def state_routes(observer: Observer, traces: TraceStore, authorize: Authorize = anybody) -> list[BaseRoute]:
    """The routes above. `observer.keep_observed()` must run for the first two to say anything new."""

    async def state(request: Request) -> Response:
        await authorize(request)
        return JSONResponse(state_as_json(observer.state), headers=UNCACHED)

    async def events(request: Request) -> Response:
        await authorize(request)
        if observer.is_crowded:
            raise HTTPException(503, "too many watch the swarm already; read /api/v1/state now and then")
        return StateStream(observer)

    async def latest(request: Request) -> Response:
        owner = await authorize(request)
        found = traces.latest(owner, _count(request))
        return JSONResponse({"traces": [trace_facts.summary(trace) for trace in found]}, headers=UNCACHED)

    async def one(request: Request) -> Response:
        trace = traces.find(request.path_params["trace_id"], await authorize(request))
        if trace is None:
            raise HTTPException(404, f"no such trace; the latest {MAX_TRACES} answers are kept, for their callers")
        return JSONResponse(trace_facts.whole(trace), headers=UNCACHED)

    return [
        Route("/api/v1/state", state),
        Route("/api/v1/events", events),
        Route("/api/v1/traces", latest),
        Route("/api/v1/traces/{trace_id}", one),
    ]


class StateStream(Response):
    """The state as server-sent events, until the reader hangs up or takes nothing for too long."""

    media_type = "text/event-stream"

    def __init__(self, observer: Observer) -> None:
        super().__init__(headers={**UNCACHED, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect, TimeoutError):  # there is nobody to tell
            await run_until_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(told(self._observer)) as events:
            async for event in events:
                async with asyncio.timeout(SEND_TIMEOUT_S):  # who does not read holds a place that others want
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})


def state_as_json(state: SwarmState) -> dict[str, Any]:
    return {
        "number": state.number,
        "at": state.at,
        "version": __version__,
        "models": [as_json(status) for status in state.models],
        "changes": [asdict(change) for change in state.changes],
    }


async def told(observer: Observer) -> AsyncGenerator[str]:
    """The state as server-sent events, for ever."""
    with observer.watching():
        known = observer.state
        yield _event(known)
        while True:
            news = await observer.wait_for_news(known.number, KEEP_ALIVE_S)
            known = news or known
            yield ": nothing new\n\n" if news is None else _event(news)


def _event(state: SwarmState) -> str:
    return f"event: state\ndata: {json.dumps(state_as_json(state), ensure_ascii=False, allow_nan=False)}\n\n"


def _count(request: Request) -> int:
    text = request.query_params.get("count", "")
    return min(int(text), MAX_TRACES) if text.isascii() and text.isdigit() and len(text) < 6 else MAX_TRACES
