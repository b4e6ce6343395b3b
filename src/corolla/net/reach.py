"""Can others dial us? A peer asks another to try its addresses on fresh connections, and to say what came of it.

An open connection hides that a new one could not be made, so the helper does not use its own network daemon: its
`probe` opens a new connection and has whoever listens there prove that it is the asking peer.

    asker → helper    u16 length, msgpack [addresses]
    helper → asker    u16 length, msgpack [where it sees the asker, a verdict for each address]

A helper is not to be used against others. It dials only what names the asker's own identity, at the address from
which the asker came or at one of the public internet, with a few hundred bytes that end when the listener is another;
and seldom: so many times by peer, by address group and by target.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from corolla.clock import loop_time
from corolla.errors import HopFailed
from corolla.ids import PeerId, short
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import group_of
from corolla.net.streams import ByteStream, Transport
from corolla.wire.tensors import Buffer

log = logging.getLogger(__name__)

PROTOCOL: Final = "/corolla/reach/1"
MAX_ADDRESSES: Final = 4
ANSWER_TIMEOUT_S: Final = 10.0
"""Of a question: names are resolved, and each address is tried for `PROBE_TIMEOUT_S`, all at once."""
PROBE_TIMEOUT_S: Final = 4.0
MAX_HELPED: Final = 8
"""Peers that are helped at the same time; another gets no answer and asks another helper."""
PEER_RATE: Final = Rate(per_s=0.1, burst=6)
GROUP_RATE: Final = Rate(per_s=0.5, burst=12)
TARGET_RATE: Final = Rate(per_s=1 / 60, burst=2)
"""Dials of one address that is not the asker's own."""

_MAX_BYTES: Final = 4096
_LENGTH_BYTES: Final = 2

Verdict = Literal["reached", "refused", "silent", "other", "loopback", "private", "busy", "unknown"]
"""
reached      the asker proved there that it listens
refused      the connection was refused, or no such host
silent       no answer in time: dropped on the way, most likely
other        somebody else listens there, or something else
loopback     an address of the asker's own machine, and the helper is on another
private      an address of a private network, and the asker came from elsewhere
busy         asked too often
unknown      a word of a later version
"""

_BUSY: Final[Verdict] = "busy"

Probe = Callable[[str, str, PeerId], Awaitable[Verdict]]
"""Tries one address (numeric host, the whole of it) for a peer on a new connection; bounded by the caller."""
Locate = Callable[[str], Awaitable[Sequence[str]]]
"""The numeric IP addresses behind an address; empty when there are none."""


class ReachAsked(Struct, frozen=True, array_like=True):
    addresses: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(min_length=1, max_length=MAX_ADDRESSES)]


class ReachAnswer(Struct, frozen=True, array_like=True):
    """`seen_from`: the IP address from which the asker came; empty when the helper cannot tell."""

    seen_from: Annotated[str, Meta(max_length=64)]
    verdicts: Annotated[list[Annotated[str, Meta(max_length=16)]], Meta(max_length=MAX_ADDRESSES)]


_asked: Final = msgspec.msgpack.Decoder(ReachAsked)
_answers: Final = msgspec.msgpack.Decoder(ReachAnswer)
_VERDICTS: Final[dict[str, Verdict]] = {word: word for word in get_args(Verdict)}


async def ask(transport: Transport, helper: PeerId, addresses: Sequence[str]) -> tuple[str | None, dict[str, Verdict]]:
    """Where the helper sees us, and what it found at each address. Raises HopFailed."""
    addresses = list(addresses)[:MAX_ADDRESSES]
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            stream = await transport.dial(helper, PROTOCOL, timeout_s=ANSWER_TIMEOUT_S)
            try:
                letter = _Letter(stream)
                stream.write([_framed(ReachAsked(addresses))])
                answer = _answers.decode(await letter.read())
            finally:
                stream.close()
    except TimeoutError:
        raise HopFailed(helper, f"no answer to a request to dial back within {ANSWER_TIMEOUT_S:g} s") from None
    except (_CutOff, msgspec.MsgspecError) as fault:
        raise HopFailed(helper, f"it does not dial back: {fault}") from fault
    verdicts: dict[str, Verdict] = {}
    for said, word in zip(addresses, answer.verdicts, strict=False):
        verdicts[said] = _VERDICTS.get(word, "unknown")
    return (answer.seen_from if group_of(answer.seen_from) is not None else None), verdicts


class Helper:
    """Dials back for others. `accept` serves `PROTOCOL`."""

    def __init__(self, address_of: Callable[[PeerId], str | None], locate: Locate, probe: Probe) -> None:
        self._address_of = address_of
        self._locate = locate
        self._probe = probe
        self._by_peer, self._by_group = Buckets(PEER_RATE), Buckets(GROUP_RATE)
        self._by_target = Buckets(TARGET_RATE)
        self._helping: set[asyncio.Task[None]] = set()

    def accept(self, stream: ByteStream) -> None:
        if len(self._helping) >= MAX_HELPED:
            stream.close()
            return
        task = asyncio.ensure_future(self._help(stream))
        self._helping.add(task)
        task.add_done_callback(self._helping.discard)

    async def close(self) -> None:
        helping = list(self._helping)
        for task in helping:
            task.cancel()
        await asyncio.gather(*helping, return_exceptions=True)

    async def _help(self, stream: ByteStream) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                letter = _Letter(stream)
                asked = _asked.decode(await letter.read())
                source = self._address_of(stream.peer)
                verdicts = await self._judge_all(stream.peer, source, asked.addresses)
                stream.write([_framed(ReachAnswer(source or "", list(verdicts)))])
                await letter.until_closed()  # the asking side closes, or our last words could be lost
        except (TimeoutError, _CutOff, msgspec.MsgspecError) as fault:
            if isinstance(fault, msgspec.MsgspecError):
                stream.report_nonsense()
            log.debug("not dialled back", extra={"peer": short(stream.peer), "reason": str(fault)})
        finally:
            stream.close()

    async def _judge_all(self, asker: PeerId, source: str | None, addresses: Sequence[str]) -> Sequence[Verdict]:
        now = loop_time()
        group = group_of(source)
        if not self._by_peer.take(asker, now) or (group is not None and not self._by_group.take(group, now)):
            return [_BUSY for _ in addresses]
        return await asyncio.gather(*(self._judge(asker, source, address) for address in addresses))

    async def _judge(self, asker: PeerId, source: str | None, address: str) -> Verdict:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                hosts = await self._locate(address)
                if not hosts:
                    return "refused"
                host = source if source is not None and source in hosts else hosts[0]
                refusal = why_not_dial(host, source)
                if refusal is None and host != source and not self._by_target.take(host, loop_time()):
                    return "busy"
                return refusal or await self._probe(host, address, asker)
        except TimeoutError:
            return "silent"


def why_not_dial(host: str, source: str | None) -> Verdict | None:
    """Why a helper leaves this numeric address alone, for an asker that came from `source`; None: it may be dialled."""
    if host == source:
        return None
    target = ipaddress.ip_address(host)
    if target.is_loopback:
        return "loopback"
    return None if target.is_global and not target.is_multicast else "private"


class _CutOff(Exception):
    """The stream ended, or said too much, before a whole letter was there."""


class _Letter:
    """The one message that the other side sends on a stream."""

    def __init__(self, stream: ByteStream) -> None:
        loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._is_whole: asyncio.Future[None] = loop.create_future()
        self._is_closed: asyncio.Future[None] = loop.create_future()
        stream.start(self._on_bytes, self._on_closed)

    async def read(self) -> bytes:
        await asyncio.wait((self._is_whole, self._is_closed), return_when=asyncio.FIRST_COMPLETED)
        size = self._size()
        if size is None or len(self._received) < size:
            raise _CutOff("the stream ended first")
        if len(self._received) > size or size > _MAX_BYTES:
            raise _CutOff(f"a message of more than {min(size, _MAX_BYTES)} bytes")
        return bytes(self._received[_LENGTH_BYTES:])

    async def until_closed(self) -> None:
        await self._is_closed

    def _on_bytes(self, data: Buffer) -> None:
        self._received += data[: _MAX_BYTES + 1 - len(self._received)]  # too many is told, not kept
        size = self._size()
        if size is not None and len(self._received) >= min(size, _MAX_BYTES) and not self._is_whole.done():
            self._is_whole.set_result(None)

    def _on_closed(self, _reason: str) -> None:
        if not self._is_closed.done():
            self._is_closed.set_result(None)

    def _size(self) -> int | None:
        """Of the whole message, its length included; None while that is not here."""
        if len(self._received) < _LENGTH_BYTES:
            return None
        return _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")


def _framed(message: Struct) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded
