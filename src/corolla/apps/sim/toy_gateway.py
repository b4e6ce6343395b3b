"""The gateway's pages over a swarm in memory, with a model that says what a test wants, as fast as it wants.

Swarm, observer, traces and every route under `/api` are the real ones; only `/v1` is made up, so that a test decides
when a token comes and when the line breaks. To work on the pages, with servers that come and go:

    python -m corolla.apps.sim.toy_gateway
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from corolla.apps.gateway.observer import Observer, ObserverConfig
from corolla.apps.gateway.pages import page_routes
from corolla.apps.gateway.state import state_routes
from corolla.apps.gateway.traced_route import describe_route
from corolla.apps.gateway.traces import AnswerTrace, StepKind, TraceStore
from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.session import RouteHop
from corolla.client.swarm import Swarm
from corolla.errors import NoRoute
from corolla.swarm.announcement import ModelEntry
from corolla.swarm.cost import CostModel
from corolla.wire.messages import HopTiming

HELLO = "Hello from **the swarm**."
NUM_BLOCKS = 30
PROMPT_TOKENS = 41


class ToyGateway:
    """Serves on a free port from a thread of its own until the block ends."""

    def __init__(self, *, api_key: str = "", path: str = "") -> None:
        """`path`: under which a proxy would show it."""
        self.api_key = api_key
        self.answer = HELLO
        self.token_s = 0.01
        self.finish = "stop"
        self.refusal: Response | None = None
        """Said once instead of an answer."""
        self.held_after: int | None = None
        """After so many tokens it waits until this is None again."""
        self.breaks_after: int | None = None
        """The connection is cut after so many tokens."""
        self.bodies: list[dict[str, Any]] = []
        """Of every chat request, in order."""
        self.hang_ups = 0
        self.url = path
        self._rng = random.Random(7)  # noqa: S311 - makes up times
        self._traces = TraceStore()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "ToyGateway":
        self._thread.start()
        if not self._ready.wait(30):
            raise RuntimeError("the toy gateway does not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End now; what is being answered is cut off."""
        self._server.should_exit = True
        self._thread.join(20)

    def chat(self, text: str, *, key: str = "") -> str:
        """Ask as a page does, and wait for the end of the stream."""
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)  # noqa: S310 - our own
        with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310
            return answer.read().decode()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:  # noqa: S310 - our own
            return answer.read().decode()

    # --- what befalls the swarm

    def serve(self, name: str, span: str) -> None:
        self._run(self._swarm.serve(name, span))

    def leave(self, name: str) -> None:
        self._run(self._swarm.leave(name))

    def kill(self, name: str) -> None:
        async def kill() -> None:
            self._swarm.network.kill(self._swarm.handlers[name].transport.peer)

        self._run(kill())

    # --- the server

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(20)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._swarm = await stack.enter_async_context(MemorySwarm(num_blocks=NUM_BLOCKS))
            self._client: Swarm = await self._swarm.client("gateway")
            served = ModelEntry(name="toy", fingerprint=self._swarm.model.fingerprint, num_blocks=NUM_BLOCKS)
            config = ObserverConfig(watched_period_s=0.3, unwatched_period_s=2)
            self._observer = Observer(self._client.transport, served=[served], config=config)
            await self._observer.look()
            observing = self._loop.create_task(self._observer.keep_observed())
            routes = [
                *page_routes(),
                *state_routes(self._observer, self._traces, self._authorize),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
            app = Starlette(routes=[Mount(self.url, routes=routes)])
            self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
            serving = self._loop.create_task(self._server.serve())
            while not self._server.started:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}{self.url}"
            self._ready.set()
            await serving
            observing.cancel()
            await asyncio.wait([observing])

    async def _authorize(self, request: Request) -> str:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise HTTPException(401, "a key is needed")
        return ""

    async def _models(self, request: Request) -> Response:
        await self._authorize(request)
        return JSONResponse({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        await self._authorize(request)
        self.bodies.append(await request.json())
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            return refusal
        return StreamingResponse(self._answer(), media_type="text/event-stream")

    async def _answer(self) -> AsyncIterator[str]:
        trace = self._traces.begin(model="toy", now=time.time())
        tokens = [part for word in self.answer.split(" ") for part in (word, " ")][:-1]
        is_whole = False
        try:
            for number, token in enumerate(tokens):
                if number == self.breaks_after:
                    return
                while number == self.held_after:  # noqa: ASYNC110 - set from the test's thread
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self.token_s)
                await self._trace(trace, is_first=number == 0)
                yield _chunk(choices=[{"index": 0, "delta": {"content": token}, "finish_reason": None}])
            is_whole = True
        finally:
            self.hang_ups += not is_whole and self.breaks_after is None
            trace.finish(self.finish if is_whole else "cancelled")
        yield _chunk(choices=[{"index": 0, "delta": {}, "finish_reason": self.finish}])
        yield _chunk(choices=[], usage={"completion_tokens": len(tokens)}, corolla=_note(trace))
        yield "data: [DONE]\n\n"

    async def _trace(self, trace: AnswerTrace, *, is_first: bool) -> None:
        """A step over the best route, with times that look like real ones."""
        router = self._client.router(self._swarm.model)
        try:
            route = await router.find_route(tokens_needed=64)
        except NoRoute:  # a test may chat without servers
            return
        if trace.route is None:
            hops = [RouteHop(hop.peer, hop.start, hop.end) for hop in route.hops]
            trace.took_route(*describe_route(router, hops, CostModel(), tokens_needed=64))
        assert trace.route is not None
        block_s = 0.006 if is_first else 0.001
        times = [
            HopTiming(
                self._rng.expovariate(300),
                block_s * (hop.end - hop.start) * self._rng.uniform(0.9, 1.3),
                self._rng.uniform(0.0004, 0.0012),
            )
            for hop in trace.route.hops
        ]
        at_hops_s = sum(time.queue_s + time.compute_s + time.send_s for time in times)
        total_s = 0.004 + at_hops_s + self._rng.uniform(0.02, 0.04)
        tokens = PROMPT_TOKENS if is_first else 1
        kind: StepKind = "prefill" if is_first else "decode"
        trace.saw_step(kind, tokens=tokens, total_s=total_s, local_s=0.004, chunks=[times])


def _note(trace: AnswerTrace) -> dict[str, Any]:
    """As the gateway's own answers end (`apps/gateway/responses.py`)."""
    hops = trace.route.hops if trace.route is not None else ()
    route = [{"peer": hop.peer, "name": hop.name, "start": hop.start, "end": hop.end} for hop in hops]
    return {"trace_id": trace.id, "route": route, "tokens_per_s": trace.tokens_per_s}


def _chunk(**fields: Any) -> str:
    said = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "toy", **fields}
    return f"data: {json.dumps(said)}\n\n"


def main() -> None:
    """Serve until interrupted, while servers come, leave and die."""
    rng = random.Random()  # noqa: S311 - only for show
    with ToyGateway() as gateway:
        for name, span in (("attic", "0:15"), ("cellar", "15:30"), ("workstation", "0:30")):
            gateway.serve(name, span)
        sys.stdout.write(f"{gateway.url}\n")
        sys.stdout.flush()
        for number in itertools.count():
            time.sleep(8)
            start = rng.randrange(0, NUM_BLOCKS - 10)
            gateway.serve(f"guest {number}", f"{start}:{start + 10}")
            time.sleep(8)
            (gateway.leave if rng.random() < 0.5 else gateway.kill)(f"guest {number}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
