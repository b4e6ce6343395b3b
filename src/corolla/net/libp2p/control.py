"""What is said to the daemon over its control socket: one request per connection, each a varint-framed protobuf.

After a stream is opened, the very connection that asked for it carries the stream's bytes. What needs another peer
is bounded by the caller. Nothing leaks a socket: that of a failed or cancelled request is closed.
"""

import asyncio
import ipaddress
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from corolla.errors import RemoteProtocolError, SwarmError
from corolla.ids import PeerId
from corolla.net.groups import AddressGroup, group_of
from corolla.net.identity import peer_id_bytes, peer_id_from_bytes
from corolla.net.libp2p.lean import hivemind

ANSWER_TIMEOUT_S: Final = 15.0
"""Of a question that needs no other peer: a millisecond, but seconds where several servers start on one machine."""
MAX_ANSWER_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 16
_IP4, _IP6 = b"\x04", b"\x29"
"""Multiaddr's codes of what four or sixteen bytes of address follow."""


class DaemonRefused(SwarmError):
    """The daemon answered a request with an error: its own words."""


class DaemonSilent(DaemonRefused):
    """The daemon did not answer at all: it has perhaps ended."""


@dataclass(frozen=True, slots=True)
class RawStream:
    """A connected socket whose next bytes are the stream's; `early` came together with the daemon's answer."""

    sock: socket.socket
    peer: PeerId
    protocol: str
    early: bytes
    address: str | None = None
    """The other end's numeric IP address; of a relayed stream, the relay's."""


@dataclass(frozen=True, slots=True)
class Control:
    """The daemon behind this unix socket."""

    path: Path

    async def identify(self) -> tuple[PeerId, list[str]]:
        """Our peer id and the multiaddrs (without it) that the daemon tells others."""
        answer = (await self._ask(_request("IDENTIFY"))).identify
        return peer_id_from_bytes(answer.id), [str(hivemind().Multiaddr(address)) for address in answer.addrs]

    async def connect(self, peer: PeerId, multiaddrs: Sequence[str], timeout_s: float) -> None:
        """Be connected to a peer; without addresses the daemon looks for them. Raises DaemonRefused."""
        request = _request("CONNECT")
        request.connect.peer = peer_id_bytes(peer)
        # Without the `/p2p/ID` at their end, which hivemind encodes in a way that the daemon refuses.
        request.connect.addrs.extend(hivemind().Multiaddr(address).to_bytes() for address in multiaddrs)
        request.connect.timeout = math.ceil(timeout_s)
        (await self._exchange(request))[0].close()

    async def connected_peers(self) -> dict[PeerId, list[str]]:
        """Who we are connected to, and over which addresses."""
        peers = (await self._ask(_request("LIST_PEERS"))).peers
        return {
            peer_id_from_bytes(peer.id): [str(hivemind().Multiaddr(address)) for address in peer.addrs]
            for peer in peers
        }

    async def connected_groups(self) -> dict[PeerId, AddressGroup]:
        """From which address group each peer is connected to us; those that cannot be told are left out."""
        peers = (await self._ask(_request("LIST_PEERS"))).peers
        groups = ((peer.id, group_of(ip_of(address))) for peer in peers for address in peer.addrs)
        return {peer_id_from_bytes(peer): group for peer, group in groups if group is not None}

    async def disconnect(self, peer: PeerId) -> None:
        """End all connections to a peer, and every stream on them. It may come back."""
        request = _request("DISCONNECT")
        request.disconnect.peer = peer_id_bytes(peer)
        await self._ask(request)

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float) -> RawStream:
        """Dial. Raises DaemonRefused when the peer cannot be reached or does not know the protocol."""
        request = _request("STREAM_OPEN")
        request.streamOpen.peer = peer_id_bytes(peer)
        request.streamOpen.proto.append(protocol)
        request.streamOpen.timeout = math.ceil(timeout_s)
        sock, answer, early = await self._exchange(request)
        info = answer.streamInfo
        return RawStream(sock, peer_id_from_bytes(info.peer), protocol, early, ip_of(info.addr))

    async def handle_streams(self, protocol: str, listener: Path) -> None:
        """Have the daemon connect to `listener` for each incoming stream of `protocol`."""
        request = _request("STREAM_HANDLER")
        request.streamHandler.addr = hivemind().Multiaddr(f"/unix{listener}").to_bytes()
        request.streamHandler.proto.append(protocol)
        request.streamHandler.balanced = False
        await self._ask(request)

    async def _ask(self, request: Any) -> Any:
        """The answer to what the daemon knows by itself."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                sock, answer, _ = await self._exchange(request)
        except TimeoutError:
            raise DaemonRefused(f"the network daemon did not answer within {ANSWER_TIMEOUT_S:g} s") from None
        sock.close()
        return answer

    async def _exchange(self, request: Any) -> tuple[socket.socket, Any, bytes]:
        """The open connection, the daemon's answer, and what came after it."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, str(self.path))
            encoded: bytes = request.SerializeToString()
            await loop.sock_sendall(sock, _varint(len(encoded)) + encoded)
            raw, early = await _read_framed(sock)
            answer = hivemind().p2pd_pb2.Response.FromString(raw)
            if answer.type != hivemind().p2pd_pb2.Response.OK:
                raise DaemonRefused(_in_short(answer.error.msg))
        except OSError as fault:
            sock.close()
            raise DaemonSilent(f"the network daemon does not answer: {fault.strerror or fault}") from fault
        except BaseException:
            sock.close()
            raise
        return sock, answer, early


def split_introduction(sock: socket.socket, heard: bytes) -> RawStream | None:
    """An incoming stream, once all that the daemon says first is there. Raises RemoteProtocolError, ValueError."""
    frame = _split_frame(heard)
    if frame is None:
        return None
    raw, early = frame
    try:
        info = hivemind().p2pd_pb2.StreamInfo.FromString(raw)
    except hivemind().call_errors as fault:
        raise RemoteProtocolError("the daemon introduced a stream in words that are none") from fault
    return RawStream(sock, peer_id_from_bytes(info.peer), str(info.proto), early, ip_of(info.addr))


def ip_of(multiaddr: bytes) -> str | None:
    """The numeric IP address that an encoded multiaddr begins with."""
    size = {_IP4: 4, _IP6: 16}.get(multiaddr[:1])
    packed = multiaddr[1 : 1 + (size or 0)]
    return str(ipaddress.ip_address(packed)) if size is not None and len(packed) == size else None


async def _read_framed(sock: socket.socket) -> tuple[bytes, bytes]:
    """One length-prefixed message and whatever was read beyond it."""
    loop = asyncio.get_running_loop()
    data = b""
    while (frame := _split_frame(data)) is None:
        more = await loop.sock_recv(sock, _READ_BYTES)
        if not more:
            raise DaemonSilent("the network daemon closed the connection")
        data += more
    return frame


def _split_frame(data: bytes) -> tuple[bytes, bytes] | None:
    """Message and rest, or None while more is to come."""
    length = shift = 0
    for at, byte in enumerate(data[:10]):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if length > MAX_ANSWER_BYTES:
                raise RemoteProtocolError(f"the daemon announced {length} bytes; at most {MAX_ANSWER_BYTES}")
            end = at + 1 + length
            return (data[at + 1 : end], data[end:]) if len(data) >= end else None
    if len(data) >= 10:
        raise RemoteProtocolError("the daemon sent a length of more than 10 bytes")
    return None


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _request(kind: str) -> Any:
    request = hivemind().p2pd_pb2.Request()
    request.type = hivemind().p2pd_pb2.Request.Type.Value(kind)
    return request


def _in_short(message: str) -> str:
    """The daemon's words on one line; it lists every address it tried, one a line."""
    return "; ".join(line.strip(" *\t") for line in message.splitlines() if line.strip())[:500]
