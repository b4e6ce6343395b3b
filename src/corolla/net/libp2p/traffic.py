"""What the hash table costs this peer: calls and bytes, its own and those it answers for others; for metrics.

Counted around hivemind's calls, below the swarm key's seal: what was refused was received all the same. Bytes are
those of the messages; what libp2p adds around them is not seen here.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class DhtTraffic:
    """Since this peer started."""

    puts: int = 0
    failed_puts: int = 0
    """Nobody else keeps what was published."""
    gets: int = 0
    records_read: int = 0
    bytes_put: int = 0
    bytes_read: int = 0
    calls_made: Counter[str] = field(default_factory=Counter[str])
    """To other peers, by kind (`find`, `store`, `ping`): searches of our own, and being a neighbour."""
    calls_answered: Counter[str] = field(default_factory=Counter[str])
    """Of other peers, by kind."""
    calls_refused: Counter[str] = field(default_factory=Counter[str])
    """Of other peers: no swarm key, not listed, too many from one network, or not understood."""
    records_refused: Counter[str] = field(default_factory=Counter[str])
    """By flaw: what others wanted kept here, and what was in their replies."""
    bytes_sent: int = 0
    bytes_received: int = 0

    def count_calls(self, p2p: Any) -> None:
        """Count every call that this hivemind `P2P` makes and takes from now on."""
        p2p.call_protobuf_handler = self._counting_made(p2p.call_protobuf_handler)
        p2p.add_protobuf_handler = self._counting_taken(p2p.add_protobuf_handler)

    def _counting_made(self, call_plain: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(peer: Any, name: str, request: Any, response_type: Any) -> Any:
            self.calls_made[_kind(name)] += 1
            self.bytes_sent += request.ByteSize()
            response = await call_plain(peer, name, request, response_type)
            self.bytes_received += response.ByteSize()
            return response

        return call

    def _counting_taken(self, add_plain: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def add(name: str, handler: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> None:
            async def counted(request: Any, context: Any) -> Any:
                self.bytes_received += request.ByteSize()
                try:
                    response = await handler(request, context)
                except Exception:
                    self.calls_refused[_kind(name)] += 1
                    raise
                self.calls_answered[_kind(name)] += 1
                self.bytes_sent += response.ByteSize()
                return response

            await add_plain(name, counted, *args, **kwargs)

        return add


def _kind(name: str) -> str:
    """`find` of `DHTProtocol.rpc_find`."""
    return name.rpartition("rpc_")[2]
