"""How much of a server one client may take: caps by peer and by address group, and a share kept for listed peers.

Pure: `now` is loop time and comes as an argument; whoever takes something gives it back. A peer id costs nothing, so
a flood has many of them; its address groups are few (`net/groups.py`), so those are capped as well. What is refused
is `Overloaded` with the value and the bound: the client takes another server.

    opens a second      a token bucket by peer and by group, so that a burst passes and a flood does not
    routes a second     likewise: a session that is held may be given a new one, which costs about as much
    sessions            counted by peer, by group and in all
    leased tokens       counted likewise
    bytes in flight     counted likewise: of steps that have come and are not computed

Of what is counted in all, strangers get no more than the part that is not reserved for listed peers; caps by group
do not hold for those.
"""

from dataclasses import dataclass, field
from typing import Final

from corolla.errors import BadInput, Overloaded
from corolla.ids import PeerId
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import AddressGroup, group_of
from corolla.server.counts import add


@dataclass(frozen=True, slots=True)
class Cap:
    """Most that one peer, one address group, and all together may hold."""

    peer: int
    group: int
    total: int

    def __post_init__(self) -> None:
        if not 0 < self.peer <= self.group <= self.total:
            raise BadInput(f"caps must grow from peer to group to total, not {self}")


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The defaults leave room for a gateway with many users at one address, and stop one machine from filling a
    server. An `Open` costs a server about a millisecond: 80 of them a second are below a tenth of its time."""

    peer_opens: Rate = field(default=Rate(per_s=20, burst=64))
    group_opens: Rate = field(default=Rate(per_s=80, burst=256))
    peer_routes: Rate = field(default=Rate(per_s=64, burst=512))
    group_routes: Rate = field(default=Rate(per_s=192, burst=1536))
    """New routes of sessions that are held: all that may be, eight times at once, then each once a second."""
    sessions: Cap = field(default=Cap(peer=64, group=192, total=256))
    leased_tokens: Cap = field(default=Cap(peer=32_768, group=49_152, total=65_536))
    bytes_in_flight: Cap = field(default=Cap(peer=64 << 20, group=192 << 20, total=512 << 20))
    reserved: float = 0.25
    """Share of each total that only listed peers may take; nothing is kept back when none is listed."""

    def __post_init__(self) -> None:
        if not 0 <= self.reserved < 1:
            raise BadInput(f"the reserved share must be at least 0 and below 1, not {self.reserved}")


@dataclass(frozen=True, slots=True)
class Guest:
    """Who asks for something; made by `Admission.guest`."""

    peer: PeerId
    group: AddressGroup | None
    """None when the network cannot tell: then only the peer is counted."""
    is_listed: bool


@dataclass(slots=True)
class Holdings:
    """Who holds how much of one thing."""

    what: str
    cap: Cap
    reserved: float
    total: int = 0
    _by_peer: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    _by_group: dict[AddressGroup, int] = field(default_factory=dict[AddressGroup, int])

    def take(self, guest: Guest, amount: int) -> None:
        """Raises Overloaded when it would be over a cap; then nothing was taken."""
        self.check(guest, amount)
        self._change(guest, amount)

    def give_back(self, guest: Guest, amount: int) -> None:
        self._change(guest, -amount)

    def check(self, guest: Guest, amount: int) -> None:
        cap, of_peer = self.cap, self._by_peer.get(guest.peer, 0) + amount
        if of_peer > cap.peer:
            raise self._above("of one client", of_peer, cap.peer)
        if guest.group is not None and not guest.is_listed:
            of_group = self._by_group.get(guest.group, 0) + amount
            if of_group > cap.group:
                raise self._above("of one address", of_group, cap.group)
        bound = cap.total if guest.is_listed else int(cap.total * (1 - self.reserved))
        if self.total + amount > bound:
            raise self._above("in all", self.total + amount, bound)

    def held_by(self, peer: PeerId) -> int:
        return self._by_peer.get(peer, 0)

    def _above(self, whose: str, value: int, bound: int) -> Overloaded:
        return Overloaded(f"{self.what} {whose}: {value}, at most {bound} here", value=str(value), bound=str(bound))

    def _change(self, guest: Guest, amount: int) -> None:
        self.total += amount
        add(self._by_peer, guest.peer, amount)
        if guest.group is not None:
            add(self._by_group, guest.group, amount)
        assert self.total >= 0, "given back more than was taken"


class Admission:
    """One server's caps. Belongs to the loop it is used on."""

    def __init__(self, limits: AdmissionLimits | None = None, listed: frozenset[PeerId] = frozenset()) -> None:
        self.limits: Final = limits or AdmissionLimits()
        self._listed = listed
        self._peer_opens, self._group_opens = Buckets(self.limits.peer_opens), Buckets(self.limits.group_opens)
        self._peer_routes, self._group_routes = Buckets(self.limits.peer_routes), Buckets(self.limits.group_routes)
        reserved = self.limits.reserved if listed else 0.0
        self.sessions: Final = Holdings("sessions", self.limits.sessions, reserved)
        self.leased_tokens: Final = Holdings("leased tokens", self.limits.leased_tokens, reserved)
        self.bytes_in_flight: Final = Holdings("bytes in flight", self.limits.bytes_in_flight, reserved)

    def guest(self, peer: PeerId, address: str | None) -> Guest:
        """`address`: as the transport tells it (`peer_address`), None when it cannot."""
        return Guest(peer, group_of(address), peer in self._listed)

    def admit_open(self, guest: Guest, tokens: int, now: float) -> None:
        """Take a session with a lease of `tokens` (positions × rows). Raises Overloaded; then nothing is held."""
        _count_one("sessions opened", guest, self._peer_opens, self._group_opens, now)
        self.sessions.check(guest, 1)
        self.leased_tokens.take(guest, tokens)
        self.sessions.take(guest, 1)

    def close_session(self, guest: Guest, tokens: int) -> None:
        """Give back what `admit_open` took."""
        self.sessions.give_back(guest, 1)
        self.leased_tokens.give_back(guest, tokens)

    def admit_route(self, guest: Guest, now: float) -> None:
        """Count a new route of a session that is held. Raises Overloaded."""
        _count_one("new routes", guest, self._peer_routes, self._group_routes, now)


def _count_one(what: str, guest: Guest, by_peer: Buckets, by_group: Buckets, now: float) -> None:
    if not by_peer.take(guest.peer, now):
        raise _too_often(f"{what} by one client", by_peer.rate)
    if guest.group is not None and not guest.is_listed and not by_group.take(guest.group, now):
        raise _too_often(f"{what} by one address", by_group.rate)


def _too_often(what: str, rate: Rate) -> Overloaded:
    text = f"{what}: more than {rate.burst:g} at once and {rate.per_s:g} a second"
    return Overloaded(text, value=f"over {rate.burst:g}", bound=f"{rate.per_s:g}/s")
