"""Whoever asks gets its answer, however much of its request is still on the way; and nobody may go on for ever."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from corolla.apps.gateway.http_server import bind, serving
from corolla.apps.gateway.lingering import MAX_PIECES, Linger
from corolla.net.libp2p.addresses import HostPort

HEAD = b"TRACE /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n"
ANSWER = b"not here"
MB = 1 << 20

Caller = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """Answers at once, and reads nothing."""
    await send({"type": "http.response.start", "status": 405, "headers": [(b"content-length", b"%d" % len(ANSWER))]})
    await send({"type": "http.response.body", "body": ANSWER})


@asynccontextmanager
async def calling(app: Any = refuse, **bounds: Any) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Caller]]]:
    with bind(HostPort("ip4", "127.0.0.1", 0)) as own:
        async with serving(app, own, **bounds):
            yield lambda: asyncio.open_connection(*own.getsockname())


async def send(caller: Caller, data: bytes) -> None:
    async with asyncio.timeout(60):
        caller[1].write(data)
        await caller[1].drain()


async def answer(caller: Caller) -> bytes:
    async with asyncio.timeout(60):
        head = await caller[0].readuntil(b"\r\n\r\n")
        return head + await caller[0].readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))


async def send_for_ever(caller: Caller) -> None:
    async with asyncio.timeout(60):
        while True:
            await send(caller, b"x" * 65536)
            await asyncio.sleep(0.01)


def test_a_body_may_come_after_its_answer() -> None:
    async def story() -> None:
        async with calling() as call:
            for header in (b"", b"connection: close\r\n"):
                caller = await call()
                await send(caller, HEAD % (20 * MB) + header + b"\r\n")
                said = await answer(caller)
                assert said.endswith(ANSWER)
                assert said.lower().count(b"connection: close") == 1  # else the caller's next request meets the end
                await send(caller, b"x" * (20 * MB))  # more than any socket holds: somebody takes it
                caller[1].write_eof()
                assert await asyncio.wait_for(caller[0].read(), 60) == b""
                caller[1].close()

    asyncio.run(story())


def test_a_body_that_has_come_leaves_the_connection_for_the_next_request() -> None:
    async def story() -> None:
        async with calling() as call:
            caller = await call()
            for _ in range(2):
                await send(caller, HEAD % 5 + b"\r\nhello")
                assert b"connection: close" not in (await answer(caller)).lower()
            caller[1].close()

    asyncio.run(story())


def test_an_answer_waits_for_who_sends_fifty_megabytes_before_it_reads() -> None:
    async def story() -> None:
        async with calling() as call:
            caller = await call()
            await send(caller, HEAD % (50 * MB) + b"\r\n" + b"x" * (50 * MB))
            assert (await answer(caller)).endswith(ANSWER)
            caller[1].close()

    asyncio.run(story())


@pytest.mark.parametrize("linger", [Linger(max_bytes=4 * MB), Linger(total_s=0.2)], ids=["bytes", "seconds"])
def test_who_sends_for_ever_is_reset(linger: Linger) -> None:
    async def story() -> None:
        async with calling(linger=linger) as call:
            caller = await call()
            await send(caller, HEAD % (1 << 40) + b"\r\n")
            assert (await answer(caller)).endswith(ANSWER)
            with pytest.raises(ConnectionError):
                await send_for_ever(caller)

    asyncio.run(story())


def test_who_falls_silent_is_hung_up_on() -> None:
    async def story() -> None:
        async with calling(linger=Linger(silent_s=0.2, total_s=600)) as call:
            caller = await call()
            await send(caller, HEAD % 100 + b"\r\nnot all")
            assert (await answer(caller)).endswith(ANSWER)
            assert await asyncio.wait_for(caller[0].read(), 60) == b""  # our side ends at once
            await asyncio.sleep(0.5)
            with pytest.raises(ConnectionError):
                await send_for_ever(caller)

    asyncio.run(story())


def test_a_server_that_stops_waits_for_no_lingerer(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with calling(linger=Linger(silent_s=600, total_s=600)) as call:
            caller = await call()
            await send(caller, HEAD % 100 + b"\r\n")
            await answer(caller)
            assert await asyncio.wait_for(caller[0].read(), 60) == b""  # it lingers
        caller[1].close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert "timeout graceful shutdown exceeded" not in caplog.text


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """Answers once the body is whole."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            scope["state"]["gone"].set()
            return
        if not message.get("more_body"):
            await refuse(scope, receive, send)
            return


NO_HTTP: list[bytes] = [
    b"hello\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no host
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # https
    b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: some\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nx-long: " + b"x" * (20 * MB),
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n" + b"x" * (20 * MB),
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (MAX_PIECES + 1000),
]


def test_what_is_no_http_gets_an_error_in_the_apis_shape(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        gone = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["gone"] = gone
            await read_all(scope, receive, send)

        async with calling(app, linger=Linger(silent_s=600, total_s=600)) as call:
            for sent in NO_HTTP:
                gone.clear()
                caller = await call()
                await send(caller, sent)
                said = await answer(caller)
                assert said.startswith(b"HTTP/1.1 400 "), sent[:60]
                error = json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
                if b"chunked" in sent:
                    await asyncio.wait_for(gone.wait(), 60)  # the endpoint waits for no more
                caller[1].close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert not caplog.records  # nobody's nonsense is our fault


def test_a_bad_chunk_after_the_answer_began_ends_the_connection_and_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        is_over = asyncio.Event()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            is_over.set()

        async with calling(app, linger=Linger(silent_s=600, total_s=600)) as call:
            caller = await call()
            await send(caller, b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            await asyncio.wait_for(caller[0].readuntil(b"\r\n\r\na"), 60)
            await send(caller, b"xyz\r\n")
            await asyncio.wait_for(is_over.wait(), 60)
            assert await asyncio.wait_for(caller[0].read(), 60) == b""
            caller[1].close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert not caplog.records
