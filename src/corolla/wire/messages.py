"""The messages of the session protocol, in their final form (`docs/protocol.md`).

Control stream, one per (client, server): `Open`, `Opened`, `Refused`, `Heartbeat`, `Drain`, `Replay`, `HopLost`,
`LinkDown`, `Close`. Data stream, one per (session, link): `Attach` first, then `Step` one way and `Output` or
`Refused` the other. Values are checked while decoding (`wire/codec.py`): what arrives here has the right
types and lies within these bounds; whether it makes sense in a session is for the state machines to say.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from corolla.ids import Fingerprint, PeerId, SessionId
from corolla.wire.tensors import DType, WireTensor

MAX_ROWS = 1024
MAX_TOKENS = 1 << 24
MAX_HOPS = 256

PeerName = Annotated[PeerId, Meta(min_length=1, max_length=128)]
SessionKey = Annotated[SessionId, Meta(min_length=16, max_length=16)]
Digest = Annotated[Fingerprint, Meta(min_length=32, max_length=32)]
Text = Annotated[str, Meta(max_length=1024)]
Word = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
BlockIndex = Annotated[int, Meta(ge=0, le=100_000)]
Rows = Annotated[int, Meta(ge=1, le=MAX_ROWS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

Want = Literal["none", "last", "all"]
"""Which positions of a step come back to the client."""


class Message(Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of all messages; unknown fields are ignored, so that a newer minor version can add some."""


class HopTiming(Struct, frozen=True, array_like=True):
    """Where one server spent one step."""

    queue_s: Seconds
    compute_s: Seconds
    send_s: Seconds
    """Of the session's step before: what is being packed cannot say yet how long that takes. 0 in the first."""


Timings = Annotated[list[HopTiming], Meta(max_length=MAX_HOPS)]


class Open(Message, tag="open", frozen=True, kw_only=True):
    """Client → server: hold a session for me on your blocks `[start, end)`.

    Said again for an open session under a higher `route_version`, it changes the route: what is held stays.
    """

    session: SessionKey
    route_version: Count = 0
    fingerprint: Digest
    start: BlockIndex
    end: BlockIndex
    max_tokens: Tokens
    """Positions per row to lease cache for."""
    max_rows: Rows = 1
    upstream: PeerName
    """Who pushes steps: the client itself, or the hop before this one. Nobody else's are accepted."""
    next: PeerName | None = None
    """Where outputs go: the hop after this one; None is the client that opens this."""
    want: Want = "last"
    """Default for steps that do not say."""
    is_fresh: bool = True
    """Begin with nothing. False: go on with what you hold of this session; nothing, if you hold nothing."""
    hold: bool = False
    """Push nothing on to `next` until a `Replay` says from where: it has lost what it held."""
    standby: bool = False
    """Take in what is replayed, but do not reach for `next` yet: another server still does this work. Tells with
    `Opened` how far it has come, whenever it has caught up with what was sent."""
    replay_on: bool = False
    """Push steps marked `replay` on to `next` too: it is being built anew as well."""
    wire_dtype: DType
    adapter: Word | None = None
    exact: bool = False
    """Never together with another session in one pass; replays repeat the steps as they were."""
    proof: Annotated[bytes, Meta(max_length=64)] = b""
    """Reserved: who is in the swarm has been proven when the stream began (`net/gate.py`)."""


class Opened(Message, tag="opened", frozen=True, kw_only=True):
    """Server → client: the session is held; steps may come."""

    session: SessionKey
    route_version: Count = 0
    cached_tokens: Tokens = 0
    """Positions the server already holds of this session (a re-opened one)."""
    last_step_no: Annotated[int, Meta(ge=-1, le=1 << 62)] = -1
    """The last step that it has taken in."""
    journal_from: Tokens = 0
    """Positions from here on can be replayed to the next hop; 0: all of them."""
    link_rtt_s: Seconds | None = None
    """Measured round trip to `next`, when there is one."""
    max_chunk_tokens: Tokens
    """Most positions × rows the server takes in one step."""
    window_bytes: Count
    """Most bytes of hidden states in one step."""
    prefill_in_chunks: bool = True
    """False: a prompt must come in one step, and only single positions after it; this family's state is not exact in
    chunks."""
    needs_token_ids: bool = False


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """Server → client: no, and why (`errors.py`). `step_no` when it answers a step."""

    session: SessionKey
    route_version: Count = 0
    step_no: Count | None = None
    code: Word
    text: Text
    value: Word = ""
    bound: Word = ""


class Attach(Message, tag="attach", frozen=True, kw_only=True):
    """First on every data stream: which session, and which of its routes, it belongs to."""

    session: SessionKey
    route_version: Count = 0


class Step(Message, tag="step", frozen=True, kw_only=True):
    """Run these positions through your blocks. Repeating one under its `step_no` is harmless."""

    step_no: Count
    route_version: Count = 0
    position: Tokens
    """Positions held before this step, after `trim_to`."""
    trim_to: Tokens | None = None
    """First shorten every row's cache to this many positions."""
    rows: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ROWS)]], Meta(max_length=MAX_ROWS)] | None = None
    """First gather the cache's rows in this order (beams, expansion, dropping finished ones)."""
    left_padding: Annotated[list[Tokens], Meta(max_length=MAX_ROWS)] | None = None
    """Padding positions at the left of each row; None: no row has any."""
    want: Want | None = None
    replay: bool = False
    """Only rebuilds the cache: a part of the history, in order of position. A tail answers where it wants
    something."""
    hidden: WireTensor
    """[batch, new_tokens, hidden_size], or as the family shapes its stream."""
    position_ids: WireTensor | None = None
    """int64 [batch, new_tokens]; None: counted on from `position`."""
    token_ids: WireTensor | None = None
    """int64 [batch, new_tokens], only for families whose blocks need them."""
    timings: Timings = []
    """Of the hops that it has passed."""


class Output(Message, tag="output", frozen=True, kw_only=True):
    """What a step gave: the wanted positions, and each hop's timings so far."""

    step_no: Count
    route_version: Count = 0
    position: Tokens
    """Positions held after the step."""
    replay: bool = False
    """Of a replayed step, for the client to pass on where two servers cannot reach each other."""
    hidden: WireTensor | None = None
    timings: Timings = []


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """I live. An answer repeats the nonce, so that the asker knows the round trip."""

    nonce: Count
    is_reply: bool = False
    queue_s: Seconds = 0.0
    """How long a step that arrives now would wait."""


class Drain(Message, tag="drain", frozen=True, kw_only=True):
    """Server → client: I leave in `deadline_s`; move your sessions."""

    deadline_s: Seconds


class Replay(Message, tag="replay", frozen=True, kw_only=True):
    """Client → server: send on to `next` what it lacks, then whatever you held back."""

    session: SessionKey
    route_version: Count = 0
    from_position: Tokens | None = None
    """Replay the history from this position on; None: `next` has all of it."""
    from_step: Count = 0
    """Send steps from this number on again, as they were."""
    live_from: Count = 0
    """Those before this number are marked `replay`: their answers have come."""
    to: PeerName | None = None
    """Send it beside the route, to this peer, which stands by; nothing is held back. None: to `next`."""
    in_chunks: bool = True
    """False: the history goes in one step onto nothing, and in single positions onto what is held already. Who asks
    knows it from `Opened`; the one that sends may host blocks of another kind."""


class HopLost(Message, tag="hop_lost", frozen=True, kw_only=True):
    """Server → client: my neighbour `peer` is gone; `step_no` was the last that crossed that link."""

    session: SessionKey
    route_version: Count = 0
    peer: PeerName
    step_no: Count | None = None


class LinkDown(Message, tag="link_down", frozen=True, kw_only=True):
    """Server → client: I cannot reach `peer`; send that link's traffic through yourself."""

    session: SessionKey
    route_version: Count = 0
    peer: PeerName
    text: Text = ""


class Close(Message, tag="close", frozen=True, kw_only=True):
    """Client → server: drop the session and what it holds. Server → client: I dropped it, and why."""

    session: SessionKey
    text: Text = ""


AnyMessage = Open | Opened | Refused | Attach | Step | Output | Heartbeat | Drain | Replay | HopLost | LinkDown | Close
