"""A whole network in one process: peers, and what befalls them.

    network = MemoryNetwork(random.Random(1))
    async with network.transport("a") as a, network.transport("b") as b:
        await b.join(a.addresses, timeout_s=5)

Peers know whom they joined and, through them, all others; a lookup asks along those acquaintances, so two parts
that nobody joined stay apart. Addresses are `memory://<peer id>`; identities follow from the names, so that a peer
of the same name that comes back is the same peer. Runs on any loop, but is made for `loop.run_virtual`.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Final

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.gate import GateConfig
from corolla.net.memory.links import Link, LinkConditions, Links
from corolla.net.memory.records import MemoryRecords
from corolla.net.memory.transport import OPEN, MemoryTransport, identity_of


class MemoryNetwork:
    """Owns the peers and the links between them; the faults are its methods."""

    def __init__(self, rng: random.Random, conditions: LinkConditions | None = None) -> None:
        self.links: Final = Links(rng, conditions or LinkConditions())
        self.hidden: Final[set[PeerId]] = set()
        self._living: dict[PeerId, MemoryTransport] = {}
        self._reachable: dict[PeerId, dict[PeerId, MemoryTransport]] = {}
        self._keepers: dict[PeerId, dict[PeerId, MemoryRecords]] = {}

    def transport(
        self,
        name: str,
        *,
        clock_skew_s: float = 0.0,
        is_client: bool = False,
        gate: GateConfig = OPEN,
        address: str | None = None,
        listed: frozenset[PeerId] = frozenset(),
    ) -> "MemoryTransport":
        """A peer that is there from `async with` on. Its wall clock is ahead by `clock_skew_s`.

        A client keeps no records for others: nobody asks it anything while it asks nothing. `address`: the numeric
        one that others see; by default a network of its own, which follows from the name. `listed`: peers whose
        streams it takes whatever others do.
        """
        identity = identity_of(name)
        return MemoryTransport(
            self, identity, clock_skew_s,
            is_client=is_client, gate=gate, address=address or _own_address(identity.peer), listed=listed,
        )  # fmt: skip

    @property
    def living(self) -> Mapping[PeerId, "MemoryTransport"]:
        return self._living

    # What befalls peers and links.

    def kill(self, peer: PeerId) -> None:
        """The process dies: its streams end at once, the news travels to the other sides, dials are refused."""
        transport = self._living.get(peer)
        if transport is not None:
            transport.end("the peer was killed")
            self.links.thaw(peer)  # the operating system closes a dead process's sockets even if it was stopped

    def freeze(self, peer: PeerId) -> None:
        """Silence: nothing reaches the peer, nothing leaves it. What is on its way waits."""
        self.links.freeze(peer)
        self.changed()

    def thaw(self, peer: PeerId) -> None:
        self.links.thaw(peer)
        self.changed()

    def partition(self, side: Iterable[PeerId], other_side: Iterable[PeerId], *, one_way: bool = False) -> None:
        """Cut every link from `side` to `other_side` (and back): silence, not reset."""
        for link in _links_between(side, other_side, one_way=one_way):
            self.links.cut(link)
        self.changed()

    def heal(self, side: Iterable[PeerId], other_side: Iterable[PeerId], *, one_way: bool = False) -> None:
        """Mend what `partition` cut; what waited arrives."""
        for link in _links_between(side, other_side, one_way=one_way):
            self.links.mend(link)
        self.changed()

    def set_conditions(self, a: PeerId, b: PeerId, conditions: LinkConditions, *, one_way: bool = False) -> None:
        """How the link from `a` to `b` (and back) behaves from now on."""
        for link in _links_between([a], [b], one_way=one_way):
            self.links.set_conditions(link, conditions)

    def hide(self, peer: PeerId) -> None:
        """Nobody can dial this peer back at its address any more, as behind a NAT; what it dials works."""
        self.hidden.add(peer)

    # For the transports.

    def enter(self, transport: "MemoryTransport") -> None:
        if transport.peer in self._living:
            raise BadInput(f"peer {transport.peer} is already running")
        self._living[transport.peer] = transport
        self.changed()

    def leave(self, transport: "MemoryTransport") -> None:
        self._living.pop(transport.peer, None)
        self.changed()

    def changed(self) -> None:
        """Who reaches whom may be different now. Those who lost their bootstrap peers look for them again."""
        self._forget_who_reaches_whom()
        for transport in self._living.values():
            transport.rejoin_later()

    def answers(self, asker: PeerId, other: PeerId) -> bool:
        """Whether a request from one to the other would be answered now."""
        return other in self._living and self.links.is_open((asker, other)) and self.links.is_open((other, asker))

    def reachable(self, asker: "MemoryTransport") -> Mapping[PeerId, "MemoryTransport"]:
        """All peers that `asker` finds by asking the peers it knows, those that they know, and so on."""
        if self._living.get(asker.peer) is not asker:
            return {}
        if asker.peer not in self._reachable:
            self._reachable[asker.peer] = self._look_around(asker)
        return self._reachable[asker.peer]

    def keepers(self, asker: "MemoryTransport") -> Mapping[PeerId, MemoryRecords]:
        """The records of those among them that keep any for others."""
        found = self._keepers.get(asker.peer)
        if found is None:
            found = {peer: other.records for peer, other in self.reachable(asker).items() if not other.is_client}
            if asker.peer in self._reachable:
                self._keepers[asker.peer] = found
        return found

    def _look_around(self, asker: "MemoryTransport") -> dict[PeerId, "MemoryTransport"]:
        reached: dict[PeerId, MemoryTransport] = {}
        seen = {asker.peer, *asker.known}
        to_ask = sorted(asker.known)
        is_everybody_found = False
        while to_ask:
            peer = to_ask.pop()
            if self.answers(asker.peer, peer) and self._living[peer].takes_calls_of(asker):
                reached[peer] = self._living[peer]
                is_everybody_found = is_everybody_found or self._living.keys() <= seen
                if is_everybody_found:
                    continue  # what is left to learn is who answers
                unseen = self._living[peer].known - seen
                seen |= unseen
                to_ask.extend(sorted(unseen))  # sorted: sets of strings have another order in each process
        return reached

    def introduce(self, a: "MemoryTransport", b: "MemoryTransport") -> None:
        if b.peer not in a.known or a.peer not in b.known:
            a.known.add(b.peer)
            b.known.add(a.peer)
            self._forget_who_reaches_whom()

    def _forget_who_reaches_whom(self) -> None:
        self._reachable.clear()
        self._keepers.clear()


def _own_address(peer: PeerId) -> str:
    digest = hashlib.sha256(peer.encode()).digest()
    return f"10.{digest[0]}.{digest[1]}.1"


def _links_between(side: Iterable[PeerId], other_side: Iterable[PeerId], *, one_way: bool = False) -> list[Link]:
    others = list(other_side)
    links = [(a, b) for a in side for b in others if a != b]
    return links if one_way else links + [(b, a) for a, b in links]
