"""Who is let in: the swarm key's proof at the head of every stream, and the list of allowed peers.

One gate for every transport, between its raw streams and whoever serves or dials:

    dialer                                      listener
    head, nonce D                        →      not on its list: closed, nothing read
                                         ←      nonce L, proof(listener, protocol, dialer, listener, D, L)
    no such proof: closed
    proof(dialer, …the same), and at once
    the bytes of the protocol            →      wrong, late or too long: closed

Both sides prove the key, for this protocol, between these two identities (which the transport has authenticated),
over nonces of both: a proof heard once is worth nothing elsewhere, and who holds only somebody's identity proves
nothing. The dialer waits for the listener's proof, so a stranger in a member's place gets no byte of a session: that
round trip is what the gate costs (libp2p opens streams without one). The listener speaks first because the other way
round costs two; a proof tells a stranger nothing about a key of 256 random bits.

Of several keys the listener proves each, and the dialer answers with the first of its own that is among them.

Without a key and a list the gate is not there: nothing changes on the wire.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corolla.errors import BadInput, HopFailed
from corolla.ids import PeerId, short
from corolla.net.identity import public_key_of
from corolla.net.streams import Accept, ByteStream, OnBytes, OnClosed
from corolla.net.swarm_key import MAX_KEYS, PROOF_BYTES, SwarmKey, find_common, find_prover, prove, prove_all
from corolla.wire.tensors import Buffer

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a listener waits for a dialer's proof."""
MAX_UNPROVEN: Final = 256
"""Streams that are waiting for a proof; one more closes an older one. Honest ones take a round trip."""

_HEAD: Final = b"corolla gate 1\n\x00"
_NONCE_BYTES: Final = 32
_MAX_LIST_BYTES: Final = 1 << 20
_AS_DIALER: Final = b"corolla stream 1, the dialer"
_AS_LISTENER: Final = b"corolla stream 1, the listener"


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Who may talk to us. The default lets everybody in."""

    keys: tuple[SwarmKey, ...] = ()
    """Any is accepted; none: an open swarm."""
    allowed: frozenset[PeerId] | None = None
    """Peers that may dial us; None: all that prove the key."""

    def __post_init__(self) -> None:
        if len(self.keys) > MAX_KEYS:
            raise BadInput(
                f"{len(self.keys)} swarm keys: at most {MAX_KEYS} at once, the old and the new while rotating"
            )

    @property
    def is_private(self) -> bool:
        return bool(self.keys)

    def allows(self, peer: PeerId) -> bool:
        return self.allowed is None or peer in self.allowed


class Gate:
    """One peer's gate. Belongs to the loop it is used on; `close` ends what still waits in it."""

    def __init__(self, own: PeerId, config: GateConfig) -> None:
        self.config: Final = config
        self.refused: Final[Counter[str]] = Counter()
        """How many were turned away, by reason."""
        self._own = own
        self._waiting: dict[asyncio.Task[None], GatedStream] = {}

    async def pass_out(self, stream: ByteStream, protocol: str) -> ByteStream:
        """A stream that we dialed, proven in both directions. The caller bounds the wait.

        Raises HopFailed when the listener does not prove the key; the stream is closed then, and when cancelled.
        """
        if not self.config.is_private:
            return stream
        gated = GatedStream(stream)
        try:
            await self._prove_as_dialer(gated, protocol)
        except _NotProven as fault:
            raise HopFailed(stream.peer, f"it does not prove the swarm key ({fault})") from None
        finally:
            if not gated.is_through:
                gated.close()
        return gated

    def let_in(self, stream: ByteStream, protocol: str, accept: Accept) -> None:
        """Give a stream that came in to `accept`, once its dialer has proven the key; else close it."""
        if not self.config.allows(stream.peer):
            self._refuse(stream, "not on the list", is_nonsense=True)
        elif not self.config.is_private:
            accept(stream)
        else:
            while len(self._waiting) >= MAX_UNPROVEN:
                self._drop_oldest()
            gated = GatedStream(stream)
            task = asyncio.ensure_future(self._admit(gated, protocol, accept))
            self._waiting[task] = gated
            task.add_done_callback(lambda done: self._waiting.pop(done, None))

    async def close(self) -> None:
        """Turn away whoever still waits."""
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _admit(self, gated: "GatedStream", protocol: str, accept: Accept) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._prove_as_listener(gated, protocol)
        except TimeoutError:
            self._refuse(gated, "no proof in time")
        except _NotProven as fault:
            self._refuse(gated, str(fault), is_nonsense=True)
        except asyncio.CancelledError:
            gated.close()
            raise
        else:
            try:
                accept(gated)
            except Exception:  # a handler's bug costs its stream
                log.exception("handler of incoming streams failed", extra={"protocol": protocol})
                gated.close()

    async def _prove_as_dialer(self, gated: "GatedStream", protocol: str) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        gated.write([_HEAD, ours])
        theirs = await gated.read(_NONCE_BYTES)
        fields = (protocol.encode(), self._own.encode(), gated.peer.encode(), ours, theirs)
        proofs = await gated.read(PROOF_BYTES * (await gated.read(1))[0])
        key = find_common(self.config.keys, proofs, _AS_LISTENER, *fields)
        if key is None:
            raise _NotProven("it has another")
        gated.write([prove(key, _AS_DIALER, *fields)])
        gated.let_through()

    async def _prove_as_listener(self, gated: "GatedStream", protocol: str) -> None:
        hello = await gated.read(len(_HEAD) + _NONCE_BYTES)
        if not hello.startswith(_HEAD):
            raise _NotProven("no handshake")
        ours, theirs, keys = secrets.token_bytes(_NONCE_BYTES), hello[len(_HEAD) :], self.config.keys
        fields = (protocol.encode(), gated.peer.encode(), self._own.encode(), theirs, ours)
        gated.write([ours, bytes([len(keys)]), prove_all(keys, _AS_LISTENER, *fields)])
        if find_prover(keys, await gated.read(PROOF_BYTES), _AS_DIALER, *fields) is None:
            raise _NotProven("wrong proof")
        gated.let_through()

    def _drop_oldest(self) -> None:
        """Of the peer of whose streams most wait: those of others are there for a round trip, whatever it does."""
        waiting = Counter(gated.peer for gated in self._waiting.values())
        [(peer, _)] = waiting.most_common(1)
        oldest = next(task for task, gated in self._waiting.items() if gated.peer == peer)
        self._refuse(self._waiting.pop(oldest), "too many wait")
        oldest.cancel()

    def _refuse(self, stream: ByteStream, reason: str, *, is_nonsense: bool = False) -> None:
        self.refused[reason] += 1
        if is_nonsense:
            stream.report_nonsense()
        log.debug("stream refused", extra={"peer": short(stream.peer), "reason": reason})
        stream.close()


class _NotProven(Exception):
    """The other side is no member, or ended the stream before it said so; in few words of ours."""


class GatedStream:
    """A stream whose first bytes are the handshake's. Once through, it passes everything on.

    Reading pauses whenever nobody waits for more, so what a stranger can make us keep is one read.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._early = bytearray()
        self._wanted: asyncio.Future[None] | None = None
        self._end: str | None = None
        """Why the stream is over; told once to whoever starts it."""
        self._on_bytes: OnBytes | None = None
        self._on_closed: OnClosed | None = None
        self._is_flowing = False
        self._is_paused = False
        self.is_through = False
        stream.start(self._take, self._note_end)

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    @property
    def pending_bytes(self) -> int:
        return self._stream.pending_bytes

    def write(self, parts: Sequence[Buffer]) -> None:
        self._stream.write(parts)

    def report_nonsense(self) -> None:
        self._stream.report_nonsense()

    def close(self) -> None:
        self._early.clear()
        self._is_flowing = True
        self._stream.close()

    # The handshake.

    async def read(self, num_bytes: int) -> bytes:
        """Exactly these bytes; raises _NotProven when the stream ends before."""
        while len(self._early) < num_bytes and self._end is None:
            self._wanted = self._loop.create_future()
            self._stream.resume_reading()
            await self._wanted
        if len(self._early) < num_bytes:
            raise _NotProven(
                f"the stream ended in the handshake: {self._end}; is its swarm open, or of another version?"
            )
        data = bytes(self._early[:num_bytes])
        del self._early[:num_bytes]
        return data

    def let_through(self) -> None:
        """The handshake is done; what follows waits for `start`."""
        self.is_through = True

    # As `net/streams.py` asks.

    def start(self, on_bytes: OnBytes, on_closed: OnClosed) -> None:
        assert self.is_through
        assert self._on_bytes is None, "a stream is started once"
        self._on_bytes, self._on_closed = on_bytes, on_closed
        self._loop.call_soon(self._catch_up)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._stream.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._catch_up)

    def _take(self, data: Buffer) -> None:
        if self._is_flowing and self._on_bytes is not None:
            self._on_bytes(data)
            return
        self._early += data
        self._stream.pause_reading()
        self._wake()

    def _note_end(self, reason: str) -> None:
        self._end = reason
        self._wake()
        self._tell_end()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _catch_up(self) -> None:
        """Deliver what came before the start, then let the stream flow by itself."""
        if self._on_bytes is None or self._is_paused:
            return
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            try:
                self._on_bytes(early)
            except Exception:  # a receiver's bug ends its own stream, not the loop's other work
                log.exception("receiver failed", extra={"peer": self.peer})
                self.close()
        self._is_flowing = True
        self._tell_end()
        if not self._is_paused and self._end is None:
            self._stream.resume_reading()

    def _tell_end(self) -> None:
        if self._end is not None and self._is_flowing and self._on_closed is not None:
            on_closed, self._on_closed = self._on_closed, None
            on_closed(self._end)


def load_allowed(paths: Sequence[Path]) -> frozenset[PeerId] | None:
    """The peers that these files name, one id a line, `#` before a remark; None without a file.

    Raises BadInput, naming file and line.
    """
    return frozenset(peer for path in paths for peer in _read_peers(path)) if paths else None


def _read_peers(path: Path) -> Iterator[PeerId]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_LIST_BYTES + 1)
    except OSError as fault:
        raise BadInput(f"list of peers {path} cannot be read: {fault.strerror or fault}") from fault
    if len(content) > _MAX_LIST_BYTES:
        raise BadInput(f"list of peers {path} has more than {_MAX_LIST_BYTES} bytes")
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word:
            try:
                public_key_of(PeerId(word))
            except ValueError as fault:
                raise BadInput(f"list of peers {path}, line {number}: {fault}") from fault
            yield PeerId(word)
