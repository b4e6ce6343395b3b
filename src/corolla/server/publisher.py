"""Placement over the real records: what a server reads of the swarm, and the claims that it publishes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from corolla.errors import HopFailed
from corolla.ids import Fingerprint, PeerId
from corolla.net.streams import Transport
from corolla.server.placing import PlacingConfig, claim_span, without_silent
from corolla.swarm.announcement import Announcement, announcement_key
from corolla.swarm.cost import CostModel
from corolla.swarm.placement import choose_span
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher

PING_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Of announcements, in seconds; as in `ServerConfig`."""

    period_s: float = 45.0
    lifetime_s: float = 180.0


class SwarmPublisher:
    """`placing.Publisher` on a transport.

    `describe` says what the server would announce now: while it serves nothing yet, its model, speed and room.
    """

    def __init__(
        self, transport: Transport, watcher: Watcher, describe: Callable[[], Announcement], times: Lifetimes
    ) -> None:
        self._transport = transport
        self._watcher = watcher
        self._describe = describe
        self._times = times
        self._has_claimed = False

    async def read(self) -> View:
        return await read_living(self._transport, self._watcher, self._times)

    async def claim(self, span: range) -> None:
        self._has_claimed = True
        await self._publish(msgspec.structs.replace(self._describe(), state="joining", start=span.start, end=span.stop))

    async def stay(self) -> None:
        await self._publish(self._describe())

    async def withdraw(self) -> None:
        """Take back whatever was said last, if anything was."""
        if not self._has_claimed:
            return
        await self._publish(msgspec.structs.replace(self._describe(), state="left"))

    async def _publish(self, said: Announcement) -> None:
        said = msgspec.structs.replace(said, announced_at=self._transport.wall_time())
        key = announcement_key(said.fingerprint, self._transport.peer)
        await self._transport.records.put(key, said.encode(), self._times.lifetime_s)


async def read_living(transport: Transport, watcher: Watcher, times: Lifetimes) -> View:
    """Who is there now, without those who are late with their announcement and do not answer."""

    async def answers(peer: PeerId) -> bool:
        try:
            await transport.ping(peer, timeout_s=PING_TIMEOUT_S)
        except HopFailed:
            return False
        return True

    return await without_silent(
        await watcher.refresh(),
        answers,
        wall_now=transport.wall_time(),
        lifetime_s=times.lifetime_s,
        period_s=times.period_s,
    )


@asynccontextmanager
async def claimed_span(
    transport: Transport,
    joining: Announcement,
    num_to_host: int,
    *,
    rng: random.Random,
    is_alone: bool = False,
    cost: CostModel | None = None,
    cuts: Collection[int] | None = None,
    on_disk: Collection[int] = frozenset(),
    times: Lifetimes | None = None,
    config: PlacingConfig | None = None,
) -> AsyncGenerator[range]:
    """The span that a new server should load, agreed on with others who join now, and claimed while it loads.

    `joining` holds the model, and the speed and room that are expected; its span does not matter. `is_alone`: the
    swarm begins with this server, so nobody is asked. Raises BadInput when the model cannot be cut so that
    `num_to_host` blocks make a span. The claim is taken back when what is inside fails or is
    cancelled, and so it is while others are still waited for.
    """
    times = times or Lifetimes()
    watcher = Watcher(transport, Fingerprint(joining.fingerprint), num_blocks=joining.num_blocks)
    publisher = SwarmPublisher(transport, watcher, lambda: joining, times)
    cost = cost or CostModel()

    def choose(view: View) -> range:
        return choose_span(
            view, num_to_host, joining=joining, peer=transport.peer, cost=cost, cuts=cuts, on_disk=on_disk
        )

    is_loaded, keeper = False, None
    try:
        if is_alone:
            span = choose(View(0))
            await publisher.claim(span)
        else:
            span = await claim_span(publisher, transport.peer, choose, rng=rng, config=config or PlacingConfig())
        keeper = asyncio.create_task(_keep_claimed(publisher, span, times.period_s))
        yield span
        is_loaded = True
    finally:
        if keeper is not None:
            keeper.cancel()
        if not is_loaded:  # others would leave a gap to a server that never comes, for as long as its record lives
            await publisher.withdraw()


async def _keep_claimed(publisher: SwarmPublisher, span: range, period_s: float) -> None:
    """A download may take longer than a record lives."""
    while True:
        await asyncio.sleep(period_s)
        await publisher.claim(span)
