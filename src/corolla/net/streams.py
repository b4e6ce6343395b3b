"""The seam between corolla and a network: dial, serve, byte streams, signed records.

`net/libp2p/` implements it over hivemind's daemon, `net/memory/` in one process on a virtual clock; both pass
`tests/net/test_seam.py`. Above it, `net/channel.py` speaks messages.

Rules every implementation keeps:
- A stream never loses or reorders bytes: it delivers, or it ends.
- `peer` is authenticated by the transport.
- A peer that opens streams too fast gets none through, and is cut off if it goes on (`net/guard.py`).
- `on_bytes` and `on_closed` run on the event loop; `on_closed` runs once, last, also after our own `close`.
- Nothing is contacted but the peers named by the user and the peers met through them. One exception: an address that a
  peer says is its own is tried when it asks for that, seldom and with bounds (`net/reach.py`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from corolla.ids import PeerId
from corolla.net.records import Record
from corolla.wire.tensors import Buffer

OnBytes = Callable[[Buffer], None]
OnClosed = Callable[[str], None]
"""Called with a reason that a person can read."""


class ByteStream(Protocol):
    """One bidirectional byte stream to an authenticated peer."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def pending_bytes(self) -> int:
        """Bytes written but not yet taken by the operating system (or the simulated link)."""
        ...

    def start(self, on_bytes: OnBytes, on_closed: OnClosed) -> None:
        """Begin delivering. What arrived before is delivered first. Call once."""
        ...

    def write(self, parts: Sequence[Buffer]) -> None:
        """Send these bytes in order, from any thread. Never blocks; a closed stream swallows them.

        The stream owns the buffers until they are sent: do not change them afterwards.
        """
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def report_nonsense(self) -> None:
        """What came on this stream, which the peer opened, is none of its protocol: that counts against the peer, and
        too much of it ends the connection (`net/guard.py`)."""
        ...

    def close(self) -> None:
        """End both directions at once; what was not sent is lost. May be called twice."""
        ...


Accept = Callable[[ByteStream], None]
"""Gets each incoming stream, on the event loop; must call `start` on it or `close` it."""


class Records(Protocol):
    """Signed, expiring records in a distributed hash table: many peers' values under one key."""

    async def put(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """Publish `value` under (key, our peer id) for `lifetime_s`. True: at least one other peer says that it keeps
        it (and, of the first after joining, has shown it), or there is no other peer. Bounded in time, and in cost
        whatever else lies under the key; never raises for a network reason."""
        ...

    async def get(self, key: str) -> list[Record]:
        """The records under `key`, verified and not expired, newest per peer. Empty when there are none or
        nobody answers within the bound."""
        ...


class Transport(Protocol):
    """One peer's place in the network. `async with` starts and ends it."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs, with our peer id, that others may `--join`."""
        ...

    @property
    def records(self) -> Records: ...

    @property
    def lost(self) -> str | None:
        """Why the transport itself is gone; None while it works. A dial that fails of it finds it said here."""
        ...

    def met_peers(self) -> list[PeerId]:
        """Peers that answered lately and keep records for others; a few, not all of the swarm."""
        ...

    def peer_address(self, peer: PeerId) -> str | None:
        """The numeric IP address of a peer with which a stream is open; of a relayed one, the relay's. None when no
        stream is open, or the network cannot tell."""
        ...

    def wall_time(self) -> float:
        """This peer's wall clock, seconds since the epoch."""
        ...

    async def join(self, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Meet the peers at these addresses; retried within `timeout_s`, and kept joined from then on: after
        an outage the transport rejoins by itself. Raises NoPeers when none answered in time."""
        ...

    async def dial(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        """Open a stream. Raises HopFailed when the peer is not there or does not take the protocol in time."""
        ...

    async def serve(self, protocol: str, accept: Accept) -> None:
        """Give every incoming stream of `protocol` to `accept`, until the transport ends."""
        ...

    async def ping(self, peer: PeerId, *, timeout_s: float) -> float:
        """Round-trip seconds to a peer that answers. Raises HopFailed."""
        ...

    async def wait_lost(self) -> str:
        """Return, with the reason, when the transport itself is gone (its daemon died). Streams have ended."""
        ...

    async def close(self) -> None: ...
