"""Picks the route of a session: from the watched view and what this client learnt itself, by `swarm/route.py`.

What stands in front of a request is a reading of the swarm: the very first one, one after a long rest (the view is
older than `STALE_PERIODS`), and one more before giving up. Else round trips are measured and announcements read anew
beside requests. Without requests nothing is read at all.
"""

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from corolla.client.lists import ServerLists, quantized
from corolla.clock import loop_time
from corolla.errors import HopFailed, MissingBlocks, Unsupported
from corolla.ids import Fingerprint, PeerId, short
from corolla.models.checkpoint import Checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.net.streams import Transport
from corolla.swarm.announcement import MODELS_KEY, ModelEntry
from corolla.swarm.bans import BanRules
from corolla.swarm.cost import CostModel
from corolla.swarm.peers import PeerBook
from corolla.swarm.route import Mode, Route, find_route
from corolla.swarm.rtt import pick_to_sample
from corolla.swarm.view import View
from corolla.swarm.watch import Watcher, list_models
from corolla.wire.messages import HopTiming

log = logging.getLogger(__name__)

PING_TIMEOUT_S = 2.0
SAME_FAULT_S = 1.0
"""A gateway's twenty sessions lose a server at one time: it failed once."""
PERIOD_PER_SERVER_S = 0.1
LONGEST_PERIOD_S = 90.0
"""A view of a thousand servers is megabytes: it is read more seldom, but twice in a record's life of 180 s."""
MAX_NAMED_MODELS = 3
STALE_PERIODS = 4
"""A view as old as this many refresh periods is read anew before a route is found in it, not beside it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model a client wants: told by what it loaded, not by what it is called."""

    name: str
    fingerprint: Fingerprint
    num_blocks: int
    hidden_size: int | None = None
    """Numbers for each position of a row that its blocks take; None: a session goes by its first step."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, name: str | None = None) -> "ServedModel":
        """The model of this checkpoint. `name`: how to call it in messages; None: as the checkpoint is called."""
        return cls(name or checkpoint.name, fingerprint(checkpoint), checkpoint.num_blocks)


class Router:
    """Routes for one model. Sessions tell it how their hops did (`saw_…`)."""

    def __init__(
        self, transport: Transport, model: ServedModel, cost: CostModel, *, refresh_period_s: float,
        rng: random.Random, lists: ServerLists | None = None, bans: BanRules | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self._transport = transport
        self._cost = cost
        self._rng = rng
        self._refresh_period_s = refresh_period_s
        self._lists = lists or ServerLists()
        self._book = PeerBook(bans)
        self._watcher = Watcher(transport, model.fingerprint, num_blocks=model.num_blocks)
        self._read_at: float | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def view(self) -> View:
        """The swarm as last read: every server, banned ones too."""
        return self._watcher.view

    @property
    def book(self) -> PeerBook:
        return self._book

    @property
    def rtts_s(self) -> dict[PeerId, float]:
        """Round trips that were measured; infinite: no answer."""
        return {peer: rtt.rtt_s for peer, rtt in self._book.rtts.items()}

    async def refresh(self) -> View:
        """Read the swarm's announcements now."""
        view = await self._watcher.refresh()
        self._read_at = loop_time()
        self._pinging = self._beside(self._pinging, self._ping_servers())
        return view

    async def find_route(
        self,
        *,
        tokens_needed: int,
        without: frozenset[PeerId] = frozenset(),
        mode: Mode = "min_latency",
        current: Route | None = None,
        cost: CostModel | None = None,
    ) -> Route:
        """The cheapest chain over all blocks (`current`: the one in use, kept unless another is clearly better).

        `cost`: what counts for this session (`CostModel.for_session`); None: for one that decodes. Raises
        MissingBlocks; Unsupported when only other weights are served.
        """
        await self._be_fresh()
        cost = cost or self._cost
        try:
            return self._search(tokens_needed, without, mode, current, cost)
        except MissingBlocks:
            await self.refresh()  # the view may be old: look once more before giving up
        try:
            return self._search(tokens_needed, without, mode, current, cost)
        except MissingBlocks as missing:
            self._explain_if_quantized(missing)
            await self._explain_by_other_models(missing)
            raise

    def find_part(
        self,
        blocks: range,
        *,
        tokens_needed: int,
        without: frozenset[PeerId] = frozenset(),
        cost: CostModel | None = None,
        alone: bool = False,
    ) -> Route:
        """The cheapest chain over a part of the model, from the view as it is: never waits. Raises MissingBlocks.

        `alone`: the cheapest single server that has all of these blocks, also where a chain would cost less.
        """
        cost = cost or self._cost
        view = self.usable_view(without, session_tokens=cost.session_tokens)
        if alone:
            view = view.covering(blocks)
        return find_route(view, blocks, cost, tokens_needed=tokens_needed, rng=self._rng)

    def usable_view(self, without: frozenset[PeerId] = frozenset(), *, session_tokens: int = 0) -> View:
        """What routes are searched in: the lists and bans applied, measured round trips and loads filled in.

        Servers that take no session of `session_tokens` a row are left out: a full cache may empty, this stays.
        """
        # Before bans: they leave out nobody who is needed, and one who does not take it is no substitute.
        taking = self._listed_view().without(without).taking(session_tokens)
        return self._book.applied(taking, range(self.model.num_blocks), self._cost, loop_time())

    def refuse_if_too_long(self, session_tokens: int) -> None:
        """Raises Unsupported when the model is covered, but for no session of so many tokens a row."""
        longest = self._listed_view().longest_session(range(self.model.num_blocks))
        if 0 < longest < session_tokens:
            raise Unsupported(
                f"a session of {session_tokens} tokens: the servers of this model take {int(longest)} at most",
                value=str(session_tokens), bound=str(int(longest)),
            )  # fmt: skip

    def saw_step(self, peer: PeerId, timing: HopTiming, *, num_blocks: int, num_tokens: int) -> None:
        """A step came back from this server, with these times; `num_tokens` a row went in."""
        self._book.saw_step(
            peer, queue_s=timing.queue_s, compute_s=timing.compute_s, num_blocks=num_blocks, num_tokens=num_tokens,
            now=loop_time(),
        )  # fmt: skip
        self._book.saw_success(peer)

    def saw_queue(self, peer: PeerId, queue_s: float) -> None:
        """A heartbeat said how long a step would wait there."""
        self._book.saw_queue(peer, queue_s, loop_time())

    def saw_rtt(self, peer: PeerId, rtt_s: float) -> None:
        """A heartbeat's round trip."""
        self._book.saw_rtt(peer, rtt_s, loop_time())

    def saw_fault(self, peer: PeerId) -> None:
        """This client's own evidence that the server failed: reset, silence, a wrong answer. Never for a refusal.

        What several sessions see of one loss, or one session in several places, counts once.
        """
        now = loop_time()
        if now < self._book.faulted_at(peer) + SAME_FAULT_S:
            return
        seconds = self._book.saw_fault(peer, now)
        log.info("server banned", extra={"peer": short(peer), "seconds": round(seconds, 1)})

    def saw_link_fault(self, before: PeerId, after: PeerId) -> None:
        """A server's word that it cannot reach the next one."""
        self._book.saw_link_fault((before, after), loop_time())

    async def close(self) -> None:
        for task in (self._pinging, self._refreshing):
            if task is not None:
                task.cancel()

    async def _be_fresh(self) -> None:
        age_s = None if self._read_at is None else loop_time() - self._read_at
        period_s = view_period_s(len(self.view.servers), self._refresh_period_s)
        if age_s is None or age_s > STALE_PERIODS * period_s:
            await self.refresh()
        elif age_s > period_s:
            self._refreshing = self._beside(self._refreshing, self._read_again())

    def _beside(self, running: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """One such task at a time."""
        if running is not None and not running.done():
            work.close()
            return running
        return asyncio.get_running_loop().create_task(work)

    async def _read_again(self) -> None:
        await self.refresh()

    def _listed_view(self) -> View:
        """Whom the user's lists allow, as long as their announcements last."""
        return self._lists.applied(self.view.alive(self._transport.wall_time()))

    def _search(
        self, tokens_needed: int, without: frozenset[PeerId], mode: Mode, current: Route | None, cost: CostModel
    ) -> Route:
        return find_route(
            self.usable_view(without, session_tokens=cost.session_tokens), self.model.num_blocks, cost,
            tokens_needed=tokens_needed, rng=self._rng, mode=mode, current=current,
        )  # fmt: skip

    def _explain_if_quantized(self, missing: MissingBlocks) -> None:
        hosts = [self.view.servers[peer] for peer in quantized(self.view)] if not self._lists.takes_quantized else []
        hosted = {block for server in hosts for block in range(server.start, server.end)}
        if hosted.issuperset(missing.blocks):
            raise MissingBlocks(missing.blocks, "only quantized, which was not wanted: allow quantization, or wait")

    async def _explain_by_other_models(self, missing: MissingBlocks) -> None:
        """A name says that it is meant to be the same model; else others may well be served beside it, and come first.

        Then nobody may be told that it can never be: its servers may only be away.
        """
        if self.view.servers:
            return
        entries = list_models(await self._transport.records.get(MODELS_KEY))
        others = [entry for entry in entries if entry.fingerprint != self.model.fingerprint]
        for entry in others:
            if entry.name == self.model.name:
                raise Unsupported(
                    f"the swarm serves a model named {entry.name} with the fingerprint {entry.fingerprint}; "
                    f"yours is {self.model.fingerprint}: same name, other weights",
                    value=self.model.fingerprint, bound=entry.fingerprint,
                )  # fmt: skip
        if others:
            raise MissingBlocks(
                missing.blocks,
                f"nobody serves your {self.model.name} with the fingerprint {self.model.fingerprint}; this swarm "
                f"serves {_named(others, self.model.num_blocks)}",
            )

    async def _ping_servers(self) -> None:
        picked = pick_to_sample(self.view, range(self.model.num_blocks), self._book.rtts, self._rng)
        await asyncio.gather(*(self._ping(peer) for peer in picked))

    async def _ping(self, peer: PeerId) -> None:
        try:
            rtt_s = await self._transport.ping(peer, timeout_s=PING_TIMEOUT_S)
        except HopFailed as failed:
            log.debug("no ping", extra={"peer": short(peer), "reason": failed.reason})
            self._book.saw_no_answer(peer, loop_time())
        else:
            self._book.saw_rtt(peer, rtt_s, loop_time())


def _named(models: Sequence[ModelEntry], num_blocks: int) -> str:
    """A few of these models, those of so many blocks first: they could be meant."""
    likely = sorted(models, key=lambda entry: (entry.num_blocks != num_blocks, entry.name))
    named = ", ".join(f"{entry.name} ({entry.fingerprint})" for entry in likely[:MAX_NAMED_MODELS])
    return named + (f" and {len(models) - MAX_NAMED_MODELS} more" if len(models) > MAX_NAMED_MODELS else "")


def view_period_s(num_servers: int, least_s: float) -> float:
    """How old the view may get while it is used."""
    return max(least_s, min(PERIOD_PER_SERVER_S * num_servers, LONGEST_PERIOD_S))
