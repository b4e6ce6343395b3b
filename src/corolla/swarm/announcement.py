"""What a server publishes about itself, and the index of models; read with suspicion.

An announcement is the value of a signed record under `announcement_key(fingerprint, peer)`: who publishes it is
certain, whether it makes sense is checked here. What does not is `AnnouncementRejected`, and never reaches the route
graph, a terminal or a log. On the wire both are msgpack arrays: short, and extended only by fields at the end.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from corolla.errors import BadInput, LocalProtocolError, RemoteProtocolError
from corolla.ids import Fingerprint, PeerId
from corolla.wire.messages import Digest, Seconds, Tokens

MODELS_KEY: Final = "corolla/1/models"
NUM_KEYS: Final = 4
"""Keys over which one model's servers spread. A key holds 500 records, so one would be full at 500 servers; a key for
each block would be written once for every hosted block. `benchmarks/announcing.py` measures what each costs."""
MAX_VALUE_BYTES: Final = 896
"""A record has 1024 bytes; its head, key and signature take up to 116 of them."""
MAX_NAME_CHARS: Final = 64
MAX_BLOCKS: Final = 10_000
MAX_NEXT_RTTS: Final = 8
SHORT_PEER_CHARS: Final = 10
"""Of a peer id's 52: 58 bits that nobody finds a second key for, in a fifth of the room."""
UNREACHABLE_RTT_S: Final = 3600.0
"""Announced of a server that did not answer: longer than any real round trip."""
MAX_INFLOWS: Final = 8
MAX_BYTES_PER_S: Final = 1 << 40
MAX_POSITION_BYTES: Final = 1 << 24
MAX_ADDRESSES: Final = 4
MAX_ADAPTERS: Final = 8

State = Literal["joining", "online", "draining", "left"]
"""`left` takes an announcement back: a record gives way only to one that expires later, never to nothing."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
ShortPeer = Annotated[str, Meta(min_length=1, max_length=16)]
ShortWord = Annotated[str, Meta(min_length=1, max_length=16)]
Block = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
# Bounds keep NaN and infinities out as well: msgspec refuses what does not compare.
Speed = Annotated[float, Meta(ge=0, le=1e12)]
WallTime = Annotated[float, Meta(ge=0, le=1e11)]
BytesPerS = Annotated[int, Meta(ge=1, le=MAX_BYTES_PER_S)]
PositionBytes = Annotated[int, Meta(ge=0, le=MAX_POSITION_BYTES)]
Commit = Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{40})?\Z")]
Address = Annotated[str, Meta(min_length=1, max_length=256)]


class AnnouncementRejected(RemoteProtocolError):
    """A peer announced nonsense. The reason is one of few, in our own words: safe to log and to count by."""


class Announcement(Struct, frozen=True, kw_only=True, array_like=True):
    """One server: what it hosts, how fast it is, and how much room it has."""

    state: State
    start: Block
    end: Block
    num_blocks: Block
    """Of the whole model."""
    fingerprint: Digest
    model_name: Name
    dtype: ShortWord
    quantization: ShortWord | None = None
    decode_tokens_per_s: Speed = 0.0
    """One sequence, one token at a time, through all hosted blocks; 0: not measured yet."""
    prefill_tokens_per_s: Speed = 0.0
    free_cache_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    queue_s: Seconds = 0.0
    """How long a step that arrives now waits before it runs."""
    max_session_tokens: Tokens = 0
    """Longest session the server takes; 0: it does not say."""
    adapters: Annotated[list[Name], Meta(max_length=MAX_ADAPTERS)] = []
    next_rtts: Annotated[dict[ShortPeer, Seconds], Meta(max_length=MAX_NEXT_RTTS)] = {}
    """Round trips in seconds to servers that may come after this one in a route, by `short_peer`."""
    version: Name = ""
    name: Name = ""
    addresses: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)] = []
    announced_at: WallTime = 0.0
    """The server's wall clock when it published this; 0: it does not say."""
    commit: Commit = ""
    """Of the hub's repository that the weights came from; the fingerprint, not this, says which weights they are."""
    is_movable: bool = False
    """The server goes where the swarm needs it; else it stays where its owner has put it."""
    inflows: Annotated[dict[ShortPeer, BytesPerS], Meta(max_length=MAX_INFLOWS)] = {}
    """Bytes a second that come from servers before this one, by `short_peer`, as real work has shown."""
    position_bytes: PositionBytes = 0
    """What one position's hidden states take on the wire, in the dtype of the blocks; 0: it does not say."""
    moving_to: tuple[Block, Block] | None = None
    """The span that it loads beside its own, on which it serves meanwhile, and will host instead."""

    def encode(self) -> bytes:
        """The record's value. When there are too many bytes, the fastest of `inflows` go first, then round trips (the
        longest), then addresses.

        Raises BadInput when it is too large without them, LocalProtocolError when readers would reject it.
        """
        for shorter in _ever_shorter(self):
            value = msgspec.msgpack.encode(shorter)
            if len(value) <= MAX_VALUE_BYTES:
                _check_own(value)
                return value
        raise BadInput(f"an announcement has at most {MAX_VALUE_BYTES} bytes: serve fewer adapters, or shorter names")


class ModelEntry(Struct, frozen=True, kw_only=True, array_like=True):
    """One served model, in the index under `MODELS_KEY`."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    fingerprint: Digest
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_announcements: Final = msgspec.msgpack.Decoder(Announcement)
_model_entries: Final = msgspec.msgpack.Decoder(ModelEntry)
_FIELD_PLACE: Final = re.compile(r"`\$\[(\d{1,3})\]")


def announcement_key(fingerprint: Fingerprint, peer: PeerId) -> str:
    """Where this server of this model announces itself: which of the keys follows from its id, so all are as full."""
    return announcement_keys(fingerprint)[hashlib.sha256(peer.encode()).digest()[0] % NUM_KEYS]


def announcement_keys(fingerprint: Fingerprint) -> list[str]:
    """Where all servers of this model are found."""
    return [f"corolla/1/{fingerprint}/{number}" for number in range(NUM_KEYS)]


def short_peer(peer: PeerId) -> str:
    """The end of a peer id, by which announcements name their neighbours."""
    return peer[-SHORT_PEER_CHARS:]


def decode_announcement(value: bytes) -> Announcement:
    """What a record says, once it is known to make sense. Raises AnnouncementRejected."""
    try:
        said = _announcements.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise AnnouncementRejected(_flaw(fault, Announcement)) from fault
    if not 0 <= said.start < said.end <= said.num_blocks:
        raise AnnouncementRejected("a span that is empty or outside the model")
    if said.moving_to is not None and not 0 <= said.moving_to[0] < said.moving_to[1] <= said.num_blocks:
        raise AnnouncementRejected("a span to move to that is empty or outside the model")
    _check_texts([said.model_name, said.dtype, said.quantization or "", said.version, said.name, said.fingerprint])
    _check_texts([*said.adapters, *said.next_rtts, *said.inflows, *said.addresses])
    return said


def decode_model_entry(value: bytes) -> ModelEntry:
    """What an index record says. Raises AnnouncementRejected."""
    try:
        entry = _model_entries.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise AnnouncementRejected(_flaw(fault, ModelEntry)) from fault
    _check_texts([entry.name, entry.fingerprint])
    return entry


def clean_name(text: str) -> str:
    """A name that is safe to print and to announce: printable, at most 64 characters, single spaces."""
    text = text[: 4 * MAX_NAME_CHARS]
    printable = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:MAX_NAME_CHARS].rstrip()


def _check_texts(texts: Iterable[str]) -> None:
    if not "".join(texts).isprintable():
        raise AnnouncementRejected("a text has characters that cannot be printed")


def _flaw(fault: Exception, kind: type[Struct]) -> str:
    """Which field is wrong, without any of the peer's own words (msgspec may quote them)."""
    fields = kind.__struct_fields__
    place = _FIELD_PLACE.search(str(fault))
    if isinstance(fault, msgspec.ValidationError) and place and int(place[1]) < len(fields):
        return f"{fields[int(place[1])]}: wrong type or out of bounds"
    return "not a msgpack array of the right length"


def _ever_shorter(said: Announcement) -> Iterator[Announcement]:
    yield said
    inflows = sorted(said.inflows.items(), key=lambda item: item[1])
    while inflows:
        inflows.pop()
        said = msgspec.structs.replace(said, inflows=dict(inflows))
        yield said
    rtts = sorted(said.next_rtts.items(), key=lambda item: item[1])
    while rtts:
        rtts.pop()
        yield msgspec.structs.replace(said, next_rtts=dict(rtts))
    addresses = list(said.addresses)
    while addresses:
        addresses.pop()
        yield msgspec.structs.replace(said, next_rtts={}, addresses=list(addresses))


def _check_own(value: bytes) -> None:
    try:
        decode_announcement(value)
    except AnnouncementRejected as fault:
        raise LocalProtocolError(f"this server would announce nonsense: {fault}") from fault
