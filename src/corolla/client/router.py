"""Picks the route of a session: from the watched view and this client's own round trips, by `swarm/route.py`."""

import asyncio
import logging
import random
from dataclasses import dataclass

from corolla.clock import loop_time
from corolla.errors import HopFailed, MissingBlocks, Unsupported
from corolla.ids import Fingerprint, PeerId, short
from corolla.net.streams import Transport
from corolla.swarm.announcement import MODELS_KEY
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Route, find_route
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher, list_models

log = logging.getLogger(__name__)

PING_TIMEOUT_S = 2.0
MAX_PINGED = 32
RTT_LIFE_S = 300.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model a client wants: told by what it loaded, not by what it is called."""

    name: str
    fingerprint: Fingerprint
    num_blocks: int


class Router:
    """Routes for one model. Round trips are measured beside requests, never in front of them."""

    def __init__(
        self, transport: Transport, model: ServedModel, cost: CostModel, *, refresh_period_s: float, rng: random.Random
    ) -> None:
        self.model = model
        self._transport = transport
        self._cost = cost
        self._rng = rng
        self._refresh_period_s = refresh_period_s
        self._watcher = Watcher(transport, model.fingerprint)
        self._read_at: float | None = None
        self._rtts: dict[PeerId, tuple[float, float]] = {}
        self._pinging: asyncio.Task[None] | None = None

    @property
    def view(self) -> View:
        return self._watcher.view

    async def refresh(self) -> View:
        """Read the swarm's announcements now."""
        view = await self._watcher.refresh()
        self._read_at = loop_time()
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.get_running_loop().create_task(self._ping_servers())
        return view

    async def find_route(self, *, tokens_needed: int, without: frozenset[PeerId] = frozenset()) -> Route:
        """The cheapest chain over all blocks. Raises MissingBlocks; Unsupported when only other weights are served."""
        if self._read_at is None or loop_time() - self._read_at > self._refresh_period_s:
            await self.refresh()
        try:
            return self._search(tokens_needed, without)
        except MissingBlocks:
            await self.refresh()  # the view may be old: look once more before giving up
        try:
            return self._search(tokens_needed, without)
        except MissingBlocks:
            await self._explain_if_other_weights()
            raise

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()

    def _search(self, tokens_needed: int, without: frozenset[PeerId]) -> Route:
        now = loop_time()
        fresh = {peer: rtt for peer, (rtt, at) in self._rtts.items() if now - at < RTT_LIFE_S}
        view = self.view.without(without).with_rtts(fresh)
        return find_route(view, self.model.num_blocks, self._cost, tokens_needed=tokens_needed, rng=self._rng)

    async def _explain_if_other_weights(self) -> None:
        if self.view.servers:
            return
        for entry in list_models(await self._transport.records.get(MODELS_KEY)):
            if entry.name == self.model.name and entry.fingerprint != self.model.fingerprint:
                raise Unsupported(
                    f"the swarm serves a model named {entry.name} with the fingerprint {entry.fingerprint}; "
                    f"yours is {self.model.fingerprint}: same name, other weights",
                    value=self.model.fingerprint, bound=entry.fingerprint,
                )  # fmt: skip

    async def _ping_servers(self) -> None:
        peers = list(self.view.servers)
        self._rng.shuffle(peers)
        await asyncio.gather(*(self._ping(peer) for peer in peers[:MAX_PINGED]))

    async def _ping(self, peer: PeerId) -> None:
        try:
            rtt_s = await self._transport.ping(peer, timeout_s=PING_TIMEOUT_S)
        except HopFailed as failed:
            log.debug("no ping", extra={"peer": short(peer), "reason": failed.reason})
        else:
            old = self._rtts.get(peer)
            self._rtts[peer] = (rtt_s if old is None else 0.8 * old[0] + 0.2 * rtt_s, loop_time())
