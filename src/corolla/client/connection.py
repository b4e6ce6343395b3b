"""A blocking program's place in a swarm: transport and `Swarm` living on the background loop."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from corolla.client.background import CLOSE_TIMEOUT_S, background_loop
from corolla.client.config import ClientConfig
from corolla.client.swarm import Swarm, join_swarm
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport

T = TypeVar("T")


class Connection:
    """Begins to join at once, in the background; `swarm` waits for the outcome."""

    def __init__(self, network: NetworkConfig, config: ClientConfig, peers: Sequence[str]) -> None:
        self.config = config
        self._loop = background_loop()
        self._joining: asyncio.Task[Any] | None = None
        self._stack = AsyncExitStack()
        self._joined = self._loop.start(self._join(network, peers))
        self._aclose = partial(self._leave)
        self._loop.at_exit(self._aclose)

    @property
    def swarm(self) -> Swarm:
        """The joined swarm. Raises what joining raised: NoPeers, BadInput."""
        return self._joined.result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the network's loop; blocks the calling thread."""
        return self._loop.run(work)

    def call_soon(self, work: "partial[None]") -> None:
        self._loop.call(work)

    def close(self) -> None:
        """Leave the swarm and end the daemon. May be called twice."""
        self._loop.not_at_exit(self._aclose)
        self._loop.run(self._leave())

    async def _join(self, network: NetworkConfig, peers: Sequence[str]) -> Swarm:
        self._joining = asyncio.current_task()
        transport = await self._stack.enter_async_context(open_transport(network))
        return await self._stack.enter_async_context(join_swarm(transport, peers, self.config))

    async def _leave(self) -> None:
        self._joined.cancel()
        if self._joining is not None:  # until a daemon that is just coming up is gone
            await asyncio.wait([self._joining], timeout=CLOSE_TIMEOUT_S)
        await self._stack.aclose()
