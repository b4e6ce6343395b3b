"""What the hash table costs is counted: what we ask, what we answer, what we refuse, and the bytes of all of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from corolla.net.libp2p.sealed import CallRefused
from corolla.net.libp2p.traffic import DhtTraffic


class Message:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def ByteSize(self) -> int:  # protobuf's name
        return self.num_bytes


class P2P:
    """hivemind's, as far as calls go: what it is asked it answers with twice as many bytes."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., Awaitable[Any]]] = {}

    async def call_protobuf_handler(self, _peer: Any, _name: str, request: Message, _response_type: Any) -> Message:
        return Message(2 * request.num_bytes)

    async def add_protobuf_handler(self, name: str, handler: Callable[..., Awaitable[Any]], _type: Any) -> None:
        self.handlers[name] = handler


def test_calls_and_bytes_are_counted_both_ways_and_a_refused_call_was_received() -> None:
    async def find(request: Message, _context: Any) -> Message:
        if request.num_bytes > 1000:
            raise CallRefused("too much")
        return Message(30)

    async def story() -> DhtTraffic:
        p2p, traffic = P2P(), DhtTraffic()
        traffic.count_calls(p2p)
        await p2p.add_protobuf_handler("DHTProtocol.rpc_find", find, Message)
        await p2p.call_protobuf_handler("peer", "DHTProtocol.rpc_store", Message(100), Message)
        await p2p.handlers["DHTProtocol.rpc_find"](Message(7), None)
        with pytest.raises(CallRefused):
            await p2p.handlers["DHTProtocol.rpc_find"](Message(5000), None)
        return traffic

    traffic = asyncio.run(story())
    assert (traffic.calls_made, traffic.calls_answered, traffic.calls_refused) == (
        {"store": 1}, {"find": 1}, {"find": 1},
    )  # fmt: skip
    assert traffic.bytes_sent == 100 + 30
    assert traffic.bytes_received == 200 + 7 + 5000
