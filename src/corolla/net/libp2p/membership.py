"""Joining a swarm, and staying in it: hivemind's DHT bootstraps once, and after an outage the swarm stays split.

Every 20 s some known peers are asked for an answer: the bootstrap peers for ever, and some of the peers met. One that
is no longer connected is dialled again, but only when its port takes connections: each failed dial of the daemon
lengthens its back-off, up to five minutes. While nobody answers, the round comes every 2 s. A client, which stands in
nobody's table, asks two of those met, and as many as a server only when neither they nor a bootstrap peer answers.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from corolla.clock import loop_time
from corolla.errors import BadInput, NoPeers, SwarmError
from corolla.ids import PeerId
from corolla.net.libp2p.addresses import HostPort, PeerAddress, parse_peer_address
from corolla.net.libp2p.control import Control
from corolla.net.libp2p.dht import Dht
from corolla.net.libp2p.probe import locate
from corolla.net.records import CLOCK_SKEW_S

log = logging.getLogger(__name__)

MEET_TIMEOUT_S: Final = 5.0
"""Of one try with one peer."""
LOOKUP_S: Final = 2.0
"""Of it, for names: one that nobody resolves leaves time for the peer's other addresses."""
MAX_PLACES: Final = 16
"""Asked at once of one peer: how many it has is up to others."""
ROUND_S: Final = 20.0
LOST_ROUND_S: Final = 2.0
JOIN_PAUSE_S: Final = 0.5
"""A dead bootstrap peer fails within 0.2 s: without pauses and a window, "nobody answered" would mean nothing."""
MAX_REMEMBERED: Final = 64
FORGET_AFTER_S: Final = 3600.0
"""A peer that has been silent for so long left for good; while all are silent, nobody is forgotten."""
_BACK_OFF: Final = "dial backoff"
"""The daemon's word for not trying again yet: the reason is what it said before."""
_ASKED_EACH_ROUND: Final = (16,)
_ASKED_BY_CLIENT: Final = (2, 16)
"""Of the peers met; the second number in the same round when nobody has answered. An idle client asks so few: that it
finds a dead peer of its own table minutes later costs its next search one RPC_TIMEOUT_S."""
_TOLERATED_SKEW_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a peer was met, and when (loop time) it was last there."""

    addresses: list[PeerAddress]
    seen_at: float


class Membership:
    """Who this peer knows, and the keeping in touch with them."""

    def __init__(self, own: PeerId, control: Control, dht: Dht, rng: random.Random, *, is_client: bool) -> None:
        self._own = own
        self._control = control
        self._dht = dht
        self._rng = rng
        self._asked_each_round = _ASKED_BY_CLIENT if is_client else _ASKED_EACH_ROUND
        self._bootstrap: dict[PeerId, list[PeerAddress]] = {}
        self._remembered: dict[PeerId, _Place] = {}
        self._is_alone = False
        self._skew_reported = False

    async def join(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Meet at least one of the peers at `addresses`. Raises NoPeers, or BadInput for what is no address."""
        if not addresses:
            raise BadInput("there is no address to join")
        wanted = _by_peer(parse_peer_address(address) for address in addresses)
        if set(wanted) == {self._own}:
            raise BadInput(f"{', '.join(addresses)}: this is the address of this peer itself")
        wanted.pop(self._own, None)
        self._bootstrap.update(wanted)
        reasons: dict[PeerId, str] = {}
        has_met = False
        try:
            async with asyncio.timeout(timeout_s):
                while not (has_met := await self._meet_first(wanted, reasons)):  # noqa: ASYNC110 (others' start is no event here)
                    await asyncio.sleep(JOIN_PAUSE_S)
                await self._dht.explore()
        except TimeoutError:
            if not has_met:
                tried = ", ".join(addresses)
                why = "; ".join(sorted(set(reasons.values()))) or "no answer"
                raise NoPeers(f"no peer answered at {tried} within {timeout_s:g} s ({why})") from None

    async def keep_joined(self) -> None:
        """Runs for the transport's life."""
        while True:
            await asyncio.sleep(LOST_ROUND_S if self._is_alone else ROUND_S)
            try:
                await self.keep_in_touch()
            except SwarmError as fault:
                log.debug("cannot keep in touch", extra={"fault": str(fault)})
            except Exception:  # a task's root: one odd answer must not end the rounds for good
                log.exception("keeping in touch failed")

    async def keep_in_touch(self) -> None:
        """One round."""
        connected = await self._control.connected_peers()
        self._remember(connected)
        if not self._remembered and not self._bootstrap:
            return
        was_alone, self._is_alone = self._is_alone, not await self._does_anybody_answer(connected)
        if self._is_alone and not was_alone:
            log.warning("all peers are lost; looking for them", extra={"remembered": len(self._remembered)})
        elif was_alone and not self._is_alone:
            log.info("rejoined the swarm")
            await self._dht.explore()

    async def _does_anybody_answer(self, connected: dict[PeerId, list[str]]) -> bool:
        for count in self._asked_each_round:
            some = self._rng.sample(sorted(self._remembered), min(count, len(self._remembered)))
            asked = {peer: self._remembered[peer].addresses for peer in some} | self._bootstrap
            meetings = [self._meet(peer, addresses, peer in connected) for peer, addresses in asked.items()]
            if None in await asyncio.gather(*meetings):  # each is bounded
                return True
        return False

    def _remember(self, connected: dict[PeerId, list[str]]) -> None:
        """Where the peers met can be dialled; only the last ones, so that strangers cannot fill our memory."""
        now = loop_time()
        for peer in self._dht.met_peers():
            addresses = list(_dialable(peer, connected.get(peer, ())))
            if addresses:
                self._remembered.pop(peer, None)
                self._remembered[peer] = _Place(addresses, seen_at=now)
        forgotten = list(self._remembered)[:-MAX_REMEMBERED]
        if not self._is_alone:
            forgotten += [peer for peer, place in self._remembered.items() if now - place.seen_at > FORGET_AFTER_S]
        for peer in forgotten:
            self._remembered.pop(peer, None)

    async def _meet_first(self, wanted: dict[PeerId, list[PeerAddress]], reasons: dict[PeerId, str]) -> bool:
        """Try all at once; True as soon as one has answered (the others are met in the rounds that follow)."""
        tries = {asyncio.ensure_future(self._meet(peer, places, False)): peer for peer, places in wanted.items()}
        try:
            for done in asyncio.as_completed(tries):
                if await done is None:
                    return True
            return False
        finally:
            for attempt, peer in tries.items():
                attempt.cancel()
                reason = attempt.result() if attempt.done() and not attempt.cancelled() else None
                if reason is not None and _BACK_OFF not in reason:
                    reasons[peer] = reason
            await asyncio.gather(*tries, return_exceptions=True)

    async def _meet(self, peer: PeerId, addresses: Sequence[PeerAddress], is_connected: bool) -> str | None:
        """None when the peer answered, else why not."""
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                if not is_connected:
                    places = await _find_places(addresses)
                    if not places:
                        return "connection refused, or no such host"
                    await self._control.connect(peer, [place.multiaddr for place in places], MEET_TIMEOUT_S)
                answer = await self._dht.ping(peer)
        except TimeoutError:
            return f"no answer within {MEET_TIMEOUT_S:g} s"
        except SwarmError as fault:
            return str(fault)
        self._report_skew(peer, answer.clock_ahead_s)
        return None

    def _report_skew(self, peer: PeerId, ahead_s: float) -> None:
        if abs(ahead_s) <= _TOLERATED_SKEW_S or self._skew_reported:
            return
        self._skew_reported = True
        log.warning(
            "clocks differ: set this machine's or the other's (NTP)",
            extra={"peer": peer, "peer_ahead_s": round(ahead_s, 1), "tolerated_s": CLOCK_SKEW_S},
        )


async def _find_places(addresses: Sequence[PeerAddress]) -> list[HostPort]:
    """Numeric addresses, as soon as something listens at one of them: it, and those that may answer yet.

    All are asked at once: one that swallows what is sent would hide the good ones behind it. The daemon dials all at
    once too, so what was first to answer need not be the peer. The caller bounds the wait for any to answer.
    """
    places = (await _look_up(addresses))[:MAX_PLACES]
    asked = {asyncio.ensure_future(_find_open(place)): place for place in places}
    try:
        for attempt in asyncio.as_completed(asked):
            if await attempt is not None:
                break
        known = [attempt.result() if attempt.done() else place for attempt, place in asked.items()]
        return [place for place in known if place is not None]
    finally:
        await _cancel(asked)


async def _look_up(addresses: Sequence[PeerAddress]) -> list[HostPort]:
    """Where they lead; without the names that nobody resolves in time, if others lead anywhere."""
    lookups = {asyncio.ensure_future(locate(str(address))): address.endpoint.port for address in addresses}
    try:
        done, slow = await asyncio.wait(lookups, timeout=LOOKUP_S)
        if slow and not any(lookup.result() for lookup in done):
            await asyncio.wait(slow)  # the caller bounds it
        found = [(host, port) for lookup, port in lookups.items() if lookup.done() for host in lookup.result()]
    finally:
        await _cancel(lookups)
    # One bound to an interface (`%`) is no multiaddr.
    return [HostPort("ip6" if ":" in host else "ip4", host, port) for host, port in found if "%" not in host]


async def _find_open(place: HostPort) -> HostPort | None:
    """Where something listens, asked with a connection of our own that says nothing; None when there is nothing."""
    try:
        _, writer = await asyncio.open_connection(place.host, place.port)
    except OSError:
        return None
    host, port = (writer.get_extra_info("peername") or (place.host, place.port))[:2]  # none: reset already
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return HostPort("ip6" if ":" in host else "ip4", host, port)


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _by_peer(addresses: Iterable[PeerAddress]) -> dict[PeerId, list[PeerAddress]]:
    places: dict[PeerId, list[PeerAddress]] = {}
    for address in addresses:
        places.setdefault(address.peer, []).append(address)
    return places


def _dialable(peer: PeerId, multiaddrs: Iterable[str]) -> Iterable[PeerAddress]:
    for multiaddr in multiaddrs:
        with contextlib.suppress(BadInput):
            yield parse_peer_address(f"{multiaddr}/p2p/{peer}")
