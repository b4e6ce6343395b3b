"""The floor under every hop: a step's message there and back, through the same streams, with nothing computed."""

import asyncio
import statistics
from collections.abc import Callable

from corolla.clock import loop_time
from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.channel import Channel
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport
from corolla.net.streams import ByteStream, Transport
from corolla.wire.messages import AnyMessage, Output, Step
from corolla.wire.tensors import WireTensor

ECHO_PROTOCOL = "/corolla/bench-echo/1"
ROUNDS = 200
HIDDEN = WireTensor("float32", (1, 1, 512), bytes(2048))


async def serve_echo(stop: asyncio.Event, on_ready: Callable[[PeerId, tuple[str, ...]], None]) -> None:
    """Answer every `Step` with an `Output` of the same hidden states, until `stop`."""

    def accept(stream: ByteStream) -> None:
        def answer(message: AnyMessage) -> None:
            assert isinstance(message, Step)
            channel.send(Output(step_no=message.step_no, position=message.position, hidden=message.hidden))

        channel = Channel(stream, we_dialed=False, on_message=answer, on_closed=lambda _error: None)

    async with open_transport(NetworkConfig()) as transport:
        await transport.serve(ECHO_PROTOCOL, accept)
        on_ready(transport.peer, tuple(transport.addresses))
        await stop.wait()


async def measure_echo(transport: Transport, address: str) -> float:
    """Median seconds of a round trip."""
    await transport.join([address], timeout_s=10)
    answers: asyncio.Queue[AnyMessage] = asyncio.Queue(maxsize=4)

    def closed(error: SwarmError | None) -> None:
        if error is not None:
            raise error

    stream = await transport.dial(PeerId(address.rpartition("/")[2]), ECHO_PROTOCOL, timeout_s=10)
    channel = Channel(stream, we_dialed=True, on_message=answers.put_nowait, on_closed=closed)
    seconds: list[float] = []
    for number in range(ROUNDS):
        began = loop_time()
        channel.send(Step(step_no=number, position=number, hidden=HIDDEN))
        async with asyncio.timeout(10):
            await answers.get()
        seconds.append(loop_time() - began)
    channel.close()
    return statistics.median(seconds)
