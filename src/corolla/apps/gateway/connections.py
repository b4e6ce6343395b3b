"""What the web side of an answer does: ends with its caller, and waits for no reader without a bound."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corolla.apps.gateway.errors import as_api_error

T = TypeVar("T")

DONE: Final = b"data: [DONE]\n\n"


async def run_until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller hangs up. Raises ClientDisconnect then.

    The request's body must have been read: after it, the caller can only say that it is gone.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: each a JSON object. An error after the first is an event too; then nothing follows."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]], *, send_timeout_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_gone(receive, self._write(send))
        except (ClientDisconnect, TimeoutError):
            return  # there is nobody to tell

    async def _write(self, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, event(self._first))
            last = DONE
            try:
                async for entry in rest:
                    await self._send(send, event(entry))
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge: the status has been sent, the error follows it
                last = event(as_api_error(error).body())
            await self._send(send, last, more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Raises TimeoutError when the reader takes nothing for too long."""
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})


def event(entry: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(entry) + b"\n\n"
