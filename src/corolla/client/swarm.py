"""The client's asyncio API: join a swarm, open sessions over the cheapest chain of servers.

    async with join_swarm(["/ip4/…"]) as swarm:
        async with swarm.open_session(model, max_tokens=512) as session:
            hidden = await session.step(...)

`client/model.py` puts the blocking `transformers` face on it.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from corolla.client.config import ClientConfig
from corolla.client.hop import HopLimits, ServerLink
from corolla.client.journals import Journals
from corolla.client.router import Router, ServedModel
from corolla.client.session import Session
from corolla.errors import BadInput, HopFailed, MissingBlocks, NetworkLost
from corolla.ids import Fingerprint, PeerId
from corolla.net.liveness import PeerLife
from corolla.net.streams import Transport
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Route
from corolla.wire.tensors import DType

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Dial:
    """A server is being dialled."""

    task: asyncio.Task[ServerLink]
    num_waiting: int = 0


class Swarm:
    """One client's place in a swarm: routers by model, control streams by server."""

    def __init__(self, transport: Transport, config: ClientConfig, *, rng: random.Random | None = None) -> None:
        self.transport = transport
        self.config = config
        self.journals = Journals(config.max_journal_bytes)
        self.false_alarms = 0
        """How often a server that had been called dead was heard again. Each cost time, and no text."""
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._routers: dict[Fingerprint, Router] = {}
        self._latest: dict[Fingerprint, Route] = {}
        """The route that was taken last: kept for the next session unless another is clearly better."""
        self._links: dict[PeerId, ServerLink] = {}
        self._dials: dict[PeerId, Dial] = {}
        """Under way."""
        self._is_closed = False
        self._limits = HopLimits(config.dial_timeout_s, config.open_timeout_s)

    def router(self, model: ServedModel) -> Router:
        """The router of this model; one for each fingerprint."""
        if model.fingerprint not in self._routers:
            self._routers[model.fingerprint] = Router(
                self.transport, model, self.config.cost, refresh_period_s=self.config.refresh_period_s, rng=self._rng,
                lists=self.config.servers,
            )  # fmt: skip
        return self._routers[model.fingerprint]

    @asynccontextmanager
    async def open_session(
        self,
        model: ServedModel,
        *,
        max_tokens: int,
        max_rows: int = 1,
        prompt_tokens: int = 1,
        wire_dtype: DType = "float32",
    ) -> AsyncIterator[Session]:
        """A session over all blocks of `model`, closed with the block. Raises NoRoute, Refused or HopFailed.

        `prompt_tokens`: a row's, as far as known: a long prompt's route avoids thin links.
        """
        session = await self.start_session(
            model, max_tokens=max_tokens, max_rows=max_rows, prompt_tokens=prompt_tokens, wire_dtype=wire_dtype
        )
        try:
            yield session
        finally:
            session.close()

    async def start_session(
        self,
        model: ServedModel,
        *,
        max_tokens: int,
        max_rows: int = 1,
        prompt_tokens: int = 1,
        wire_dtype: DType = "float32",
    ) -> Session:
        """Like `open_session`, for owners that close it themselves."""
        session = self.new_session(
            model, max_tokens=max_tokens, max_rows=max_rows, prompt_tokens=prompt_tokens, wire_dtype=wire_dtype
        )
        await session.start()
        return session

    def new_session(
        self,
        model: ServedModel,
        *,
        max_tokens: int,
        max_rows: int = 1,
        prompt_tokens: int = 1,
        wire_dtype: DType = "float32",
    ) -> Session:
        """One that holds nothing yet: its owner calls `start`, or `begin` with what it runs first."""
        if max_tokens < 1 or max_rows < 1:
            raise BadInput(f"a session needs at least one token and one row, not {max_tokens} and {max_rows}")
        return Session(
            self, model, self.config, max_tokens=max_tokens, max_rows=max_rows, prompt_tokens=prompt_tokens,
            wire_dtype=wire_dtype,
        )  # fmt: skip

    # --- what sessions need (`SwarmAccess`)

    @property
    def own_peer(self) -> PeerId:
        return self.transport.peer

    async def find_route(
        self, model: ServedModel, *, blocks: range, tokens_needed: int, without: frozenset[PeerId], cost: CostModel,
        alone: bool = False,
    ) -> Route:  # fmt: skip
        """The cheapest chain over `blocks` by this cost; `alone`: the cheapest single server.

        Raises MissingBlocks when even a fresh look finds none, NetworkLost when there is nothing left of ours to look
        with.
        """
        self._raise_if_lost()
        router = self.router(model)
        if len(blocks) == model.num_blocks and not alone:
            route = self._latest[model.fingerprint] = await router.find_route(
                tokens_needed=tokens_needed, without=without, mode=self.config.mode,
                current=self._latest.get(model.fingerprint), cost=cost,
            )  # fmt: skip
            return route
        try:
            return router.find_part(blocks, tokens_needed=tokens_needed, without=without, cost=cost, alone=alone)
        except MissingBlocks:
            await router.refresh()
        return router.find_part(blocks, tokens_needed=tokens_needed, without=without, cost=cost, alone=alone)

    async def link(self, peer: PeerId) -> ServerLink:
        """The control stream to this server, dialled once however many sessions ask at the same time.

        Raises HopFailed, or NetworkLost. A dial goes on when nobody waits for it any more: whether it fails says who
        is dead.
        """
        link = self._links.get(peer)
        if link is not None and link.error is None:
            return link
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = Dial(asyncio.get_running_loop().create_task(self._dial(peer)))
            dial.task.add_done_callback(_take_failure)
        dial.num_waiting += 1
        try:
            return await asyncio.shield(dial.task)
        except asyncio.CancelledError:
            if dial.task.cancelled() and self._is_closed:
                raise HopFailed(peer, "closed by this client") from None
            raise
        finally:
            dial.num_waiting -= 1

    async def _dial(self, peer: PeerId) -> ServerLink:
        link = ServerLink(
            self.transport, peer, self._limits, self.config.liveness, self._heard, self._count_false_alarm
        )
        try:
            await link.connect()
        except HopFailed:
            for router in self._routers.values():
                if peer in router.view.servers:
                    router.saw_fault(peer)
            raise
        except NetworkLost:
            self._raise_if_lost()
            raise
        finally:
            dial = self._dials.pop(peer)
        if dial.num_waiting > 0:
            self._links = {other: known for other, known in self._links.items() if known.error is None}
            self._links[peer] = link
        else:
            link.close()  # another was quicker
        return link

    def _raise_if_lost(self) -> None:
        """All streams end with our own network, and it looks as if all servers had failed: they are acquitted."""
        if self.transport.lost is not None:
            for router in self._routers.values():
                router.book.forget_faults()
            raise NetworkLost(self.transport.lost)

    def _heard(self, peer: PeerId, life: PeerLife) -> None:
        """Heartbeats tell routers what they would else have to ask for."""
        for router in self._routers.values():
            if peer in router.view.servers:
                router.saw_queue(peer, life.peer_queue_s)
                if life.rtt_s is not None:
                    router.saw_rtt(peer, life.rtt_s)

    def _count_false_alarm(self, _peer: PeerId) -> None:
        self.false_alarms += 1

    async def close(self) -> None:
        self._is_closed = True
        dials = [dial.task for dial in self._dials.values()]
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for router in self._routers.values():
            await router.close()
        for link in self._links.values():
            link.close()
        self._links.clear()


def _take_failure(dial: asyncio.Task[ServerLink]) -> None:
    """Routers know of it already; perhaps nobody waits for it any more."""
    if not dial.cancelled():
        dial.exception()


@asynccontextmanager
async def join_swarm(
    transport: Transport, initial_peers: Sequence[str], config: ClientConfig | None = None
) -> AsyncIterator[Swarm]:
    """A client on an open transport. Raises NoPeers when nobody answers at `initial_peers` in time."""
    config = config or ClientConfig()
    await transport.join(initial_peers, timeout_s=config.join_timeout_s)
    swarm = Swarm(transport, config)
    try:
        yield swarm
    finally:
        await swarm.close()
