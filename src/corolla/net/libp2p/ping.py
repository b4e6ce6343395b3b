"""The round trip to a peer: a few bytes over a stream of their own, back from any peer, clients too."""

import asyncio
import secrets

from corolla.net.streams import ByteStream
from corolla.wire.tensors import Buffer

PROTOCOL = "/corolla/ping/1"
_NUM_BYTES = 16
_MOST_ECHOED = 1024
_LIFE_S = 5.0
"""Of an answering stream: nobody keeps ours open for nothing."""


async def measure(stream: ByteStream) -> float | None:
    """Seconds until our bytes were back; None when the stream ended first. The caller bounds the wait."""
    loop = asyncio.get_running_loop()
    is_back: asyncio.Future[bool] = loop.create_future()
    nonce, received = secrets.token_bytes(_NUM_BYTES), bytearray()

    def on_bytes(data: Buffer) -> None:
        received.extend(data)
        if len(received) >= _NUM_BYTES and not is_back.done():
            is_back.set_result(bytes(received) == nonce)

    def on_closed(_reason: str) -> None:
        if not is_back.done():
            is_back.set_result(False)

    stream.start(on_bytes, on_closed)
    asked_at = loop.time()
    stream.write([nonce])
    return loop.time() - asked_at if await is_back else None


def answer(stream: ByteStream) -> None:
    """Say back what comes, for a while."""
    echoed = 0

    def on_bytes(data: Buffer) -> None:
        nonlocal echoed
        echoed += len(data)
        if echoed > _MOST_ECHOED:
            stream.report_nonsense()
            stream.close()
        else:
            stream.write([data])

    end = asyncio.get_running_loop().call_later(_LIFE_S, stream.close)
    stream.start(on_bytes, lambda _reason: end.cancel())
