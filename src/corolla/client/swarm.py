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

from corolla.client.config import ClientConfig
from corolla.client.hop import Hop, HopLimits, ServerLink
from corolla.client.router import Router, ServedModel
from corolla.client.session import Session
from corolla.errors import BadInput, CacheFull, HopFailed, NoRoute, Overloaded, SessionLost, SwarmError
from corolla.ids import Fingerprint, PeerId, new_session_id, short
from corolla.net.streams import Transport
from corolla.swarm.route import Route
from corolla.wire.messages import Open
from corolla.wire.tensors import DType

log = logging.getLogger(__name__)

MAX_ROUTES_TRIED = 4
"""How many chains an opening session tries before it gives up with the last server's answer."""


class Swarm:
    """One client's place in a swarm: routers by model, control streams by server."""

    def __init__(self, transport: Transport, config: ClientConfig, *, rng: random.Random | None = None) -> None:
        self.transport = transport
        self.config = config
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._routers: dict[Fingerprint, Router] = {}
        self._links: dict[PeerId, ServerLink] = {}
        self._dialling: dict[PeerId, asyncio.Lock] = {}
        self._limits = HopLimits(config.dial_timeout_s, config.open_timeout_s, config.step_timeout_s)

    def router(self, model: ServedModel) -> Router:
        """The router of this model; one for each fingerprint."""
        if model.fingerprint not in self._routers:
            self._routers[model.fingerprint] = Router(
                self.transport, model, self.config.cost, refresh_period_s=self.config.refresh_period_s, rng=self._rng
            )
        return self._routers[model.fingerprint]

    @asynccontextmanager
    async def open_session(
        self, model: ServedModel, *, max_tokens: int, max_rows: int = 1, wire_dtype: DType = "float32"
    ) -> AsyncIterator[Session]:
        """A session over all blocks of `model`, closed with the block. Raises NoRoute, Refused or HopFailed."""
        session = await self.start_session(model, max_tokens=max_tokens, max_rows=max_rows, wire_dtype=wire_dtype)
        try:
            yield session
        finally:
            session.close()

    async def start_session(
        self, model: ServedModel, *, max_tokens: int, max_rows: int = 1, wire_dtype: DType = "float32"
    ) -> Session:
        """Like `open_session`, for owners that close it themselves."""
        if max_tokens < 1 or max_rows < 1:
            raise BadInput(f"a session needs at least one token and one row, not {max_tokens} and {max_rows}")
        router = self.router(model)
        without: set[PeerId] = set()
        problem: SwarmError | None = None
        for _ in range(MAX_ROUTES_TRIED):
            try:
                route = await router.find_route(tokens_needed=max_tokens * max_rows, without=frozenset(without))
            except NoRoute:
                if problem is not None:  # there was a chain, and it said no: that is what the user must hear
                    raise problem from None
                raise
            try:
                hops = await self._open_hops(route, model, max_tokens, max_rows, wire_dtype)
            except _TryAnother as failed:
                without.add(failed.peer)
                problem = failed.error
                log.info("server left out", extra={"peer": short(failed.peer), "reason": str(failed.error)[:200]})
            else:
                log.info("route", extra={"hops": ", ".join(f"{short(h.peer)} {h.start}:{h.end_block}" for h in hops)})
                return Session(hops, max_tokens=max_tokens, max_rows=max_rows)
        assert problem is not None
        raise problem

    async def close(self) -> None:
        for router in self._routers.values():
            await router.close()
        for link in self._links.values():
            link.close()
        self._links.clear()

    async def _open_hops(
        self, route: Route, model: ServedModel, max_tokens: int, max_rows: int, wire_dtype: DType
    ) -> list[Hop]:
        """All hops at once; on any failure the others are closed again."""
        session = new_session_id()
        asks = [
            Open(
                session=session,
                fingerprint=model.fingerprint,
                start=hop.start,
                end=hop.end,
                max_tokens=max_tokens,
                max_rows=max_rows,
                upstream=self.transport.peer,
                wire_dtype=wire_dtype,
            )
            for hop in route.hops
        ]
        tasks = [asyncio.ensure_future(self._open(hop.peer, ask)) for hop, ask in zip(route.hops, asks, strict=True)]
        try:
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Hop):
                    outcome.close()
            raise

    async def _open(self, peer: PeerId, ask: Open) -> Hop:
        try:
            link = await self._link(peer)
            return await link.open(ask)
        except (HopFailed, CacheFull, Overloaded, SessionLost) as error:
            raise _TryAnother(peer, error) from error

    async def _link(self, peer: PeerId) -> ServerLink:
        """The control stream to this server, dialled once however many sessions ask at the same time."""
        async with self._dialling.setdefault(peer, asyncio.Lock()):
            link = self._links.get(peer)
            if link is None or link.error is not None:
                link = ServerLink(self.transport, peer, self._limits, self.config.liveness)
                await link.connect()
                self._links[peer] = link
            return link


class _TryAnother(Exception):
    """This server will not take the session now; another may."""

    def __init__(self, peer: PeerId, error: SwarmError) -> None:
        self.peer = peer
        self.error = error
        super().__init__(str(error))


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
