"""The HTTP server: uvicorn on the gateway's own event loop, with bounds on what a caller may hold without asking.

uvicorn waits for ever for a request's head that comes in drips. Here a connection without a request under way has
`head_timeout_s` for the next one; heads are at most 64 KB, connections so many. What cannot be answered at all is told
so in the API's own shape.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from corolla.apps.gateway.errors import RETRY_BUSY_S, ApiError, bad_request
from corolla.apps.gateway.lingering import FrankConnection, Linger, LingeringTransport
from corolla.errors import BadInput
from corolla.net.libp2p.addresses import HostPort

MAX_CONNECTIONS: Final = 1024
"""More are told so (503) when they ask for something; twice as many, and whoever calls is not listened to at all:
connections that say nothing take file descriptors too."""
MAX_HEAD_BYTES: Final = 64 << 10
START_TIMEOUT_S: Final = 10.0
GRACE_S: Final = 5
"""For answers under way when the gateway ends."""
KEEP_ALIVE_S: Final = 30


class _ImpatientProtocol(H11Protocol):
    """Closes a connection that asks for nothing; lets one that has its answer say the rest (see `lingering`)."""

    head_timeout_s: ClassVar[float] = 10.0
    most: ClassVar[int] = 2 * MAX_CONNECTIONS
    linger: ClassVar[Linger] = Linger()
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._frank = FrankConnection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - theirs
        self._lingering = LingeringTransport(transport, lambda: self._frank.is_midway, self.linger)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._watch()
        if len(self.connections) > self.most:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._lingering.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            self._lingering.drop(len(data))
            return
        super().data_received(data)
        if self._is_asked:
            self._unwatch()
        else:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read as HTTP gets the shape that any other error has."""
        if self._is_asked:  # it was the body that could not be read
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = bad_request(f"{msg} A head is at most {MAX_HEAD_BYTES} bytes.", code="invalid_http").response()
            for event in (
                h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request"),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        if self._lingering.is_lingering:
            self._lingering.end()
        else:
            super().shutdown()

    @property
    def _is_asked(self) -> bool:
        """Whether a request is under way: its head has come, its answer has not been given."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch(self) -> None:
        if self._deadline is None:  # the first byte of a head counts, not the latest
            self._deadline = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_asked and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def bind(address: HostPort) -> socket.socket:
    """A listening socket. Raises BadInput when that cannot be."""
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    own = socket.socket(family)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((address.host, address.port))
        own.listen(256)
    except OSError as fault:
        own.close()
        raise BadInput(f"cannot listen on {address.host}:{address.port}: {fault.strerror or fault}") from fault
    return own


@asynccontextmanager
async def serving(
    app: ASGIApp, own: socket.socket, *,
    head_timeout_s: float = 10.0, most: int = MAX_CONNECTIONS, linger: Linger = _ImpatientProtocol.linger,
) -> AsyncGenerator["asyncio.Task[None]"]:  # fmt: skip
    """The application answers on this socket for as long as the block lasts; the task ends only if the server fails."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if len(server.server_state.connections) > most:
            crowded = ApiError(503, "too many connections at once", "too_many_connections", retry_after_s=RETRY_BUSY_S)
            await crowded.response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    bounds = {"head_timeout_s": head_timeout_s, "most": 2 * most, "linger": linger}
    config = uvicorn.Config(
        answer, http=type("_Protocol", (_ImpatientProtocol,), bounds), ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES, proxy_headers=False,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[own]))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait((task,), timeout=GRACE_S + 2)
        task.cancel()


def url_of(own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
