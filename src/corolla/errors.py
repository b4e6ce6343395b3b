"""Every way a swarm can fail, and whose fault it is.

    SwarmError                     exit 1   something of ours went wrong; the message says what
    ├── NetworkLost                exit 1   this side's own network is gone, and no server to blame: join again
    ├── BadInput                   exit 2   the user's words: a model, span, flag, key file or prompt that cannot work
    ├── NoPeers                    exit 3   nobody answered at the addresses that were tried
    ├── NoRoute                    exit 4   no chain of servers does the work now; waiting or adding a server helps
    │   └── MissingBlocks(blocks)           these blocks have no server at all
    ├── HopFailed(peer)            exit 5   that server broke, went silent or vanished: take another
    ├── LinkDown(peer)             exit 5   two peers cannot reach each other; neither is to blame
    ├── Refused                    exit 6   the server is well and says no, with the value and the bound
    │   ├── CacheFull                       its KV cache has no room: wait or take another
    │   ├── Overloaded                      too many sessions or bytes in flight: wait or take another
    │   ├── Unsupported                     it cannot do this at all (other weights, version, dtype): never retry there
    │   ├── NeedsReplay                     its state cannot be trimmed to that position: rebuild the session
    │   ├── JournalGap                      what was asked for again is no longer kept: replay from further back
    │   ├── OutOfOrder                      a step came too early: the client and the server disagree on the count
    │   ├── SessionLost                     it no longer holds this session (expired, restarted): rebuild it
    │   ├── Faulty                          its own blocks gave NaN or infinity, it says itself: take another
    │   └── BadUpstream                     what the peer before it sent is NaN or infinity: ask that peer, ban nobody
    ├── LocalProtocolError         exit 7   we are about to break the protocol: a bug here
    └── RemoteProtocolError        exit 5   a peer broke the protocol: its stream ends, it is to blame

The class tells the caller what to do next: reroute, wait or give up. Libraries' errors are translated once, in
the module that touches the library.
"""

from collections.abc import Sequence
from typing import ClassVar

from corolla.ids import PeerId


class SwarmError(Exception):
    """Base of all errors that corolla raises on purpose."""

    exit_code: ClassVar[int] = 1


class NetworkLost(SwarmError):
    """This side's own network is gone: its daemon ended. No server is to blame."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"this side's own network is lost: {reason}; no server is to blame. Join the swarm again: load the model "
            "anew, or start the program again"
        )


class BadInput(SwarmError):
    """The user gave something that cannot work: a model, span, flag, key file or prompt. Nothing was sent."""

    exit_code: ClassVar[int] = 2


class NoPeers(SwarmError):
    """Nobody answered at the addresses that were tried."""

    exit_code: ClassVar[int] = 3


class NoRoute(SwarmError):
    """No chain of servers can do the work now."""

    exit_code: ClassVar[int] = 4


class MissingBlocks(NoRoute):
    """No server hosts these blocks. Found before anything is sent."""

    def __init__(self, blocks: Sequence[int], detail: str = "") -> None:
        self.blocks = list(blocks)
        super().__init__(f"no server hosts block(s) {as_ranges(self.blocks)}{'; ' + detail if detail else ''}")


class HopFailed(SwarmError):
    """A server of the route broke, went silent or vanished."""

    exit_code: ClassVar[int] = 5

    def __init__(self, peer: PeerId, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"server {peer} failed: {reason}")


class LinkDown(SwarmError):
    """Two peers cannot reach each other; neither is known to be at fault."""

    exit_code: ClassVar[int] = 5

    def __init__(self, peer: PeerId, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"no link to {peer}: {reason}")


class LocalProtocolError(SwarmError):
    """We were about to break the protocol: a bug on this side."""

    exit_code: ClassVar[int] = 7


class RemoteProtocolError(SwarmError):
    """A peer broke the protocol. Its stream ends; nothing else is touched."""

    exit_code: ClassVar[int] = 5


class Refused(SwarmError):
    """A healthy server says no. `value` is what was asked for, `bound` what it allows."""

    exit_code: ClassVar[int] = 6
    code: ClassVar[str] = "refused"

    def __init__(self, text: str, *, value: str = "", bound: str = "") -> None:
        self.text = text
        self.value = value
        self.bound = bound
        super().__init__(text)


class CacheFull(Refused):
    """The server's KV cache has no room for this session."""

    code: ClassVar[str] = "cache_full"


class Overloaded(Refused):
    """The server holds as many sessions, or as many bytes in flight, as it may."""

    code: ClassVar[str] = "overloaded"


class Unsupported(Refused):
    """The server can never do this: other weights, protocol version, dtype, span or length."""

    code: ClassVar[str] = "unsupported"


class NeedsReplay(Refused):
    """The session's state cannot be brought back to that position; it must be rebuilt."""

    code: ClassVar[str] = "needs_replay"


class JournalGap(Refused):
    """The answer to that old step is no longer kept."""

    code: ClassVar[str] = "journal_gap"


class OutOfOrder(Refused):
    """A step came before the one that should precede it."""

    code: ClassVar[str] = "out_of_order"


class SessionLost(Refused):
    """The server does not (or no longer) hold this session."""

    code: ClassVar[str] = "session_lost"


class Faulty(Refused):
    """The server's own blocks gave something that is not finite, out of something that was."""

    code: ClassVar[str] = "faulty"


class BadUpstream(Refused):
    """What came to the server is not finite; `value` is the peer that sent it. Its word about a neighbour, no more."""

    code: ClassVar[str] = "bad_upstream"


_REFUSALS: dict[str, type[Refused]] = {
    kind.code: kind
    for kind in (
        Refused,
        CacheFull,
        Overloaded,
        Unsupported,
        NeedsReplay,
        JournalGap,
        OutOfOrder,
        SessionLost,
        Faulty,
        BadUpstream,
    )
}


def refusal(code: str, text: str, *, value: str = "", bound: str = "") -> Refused:
    """The error that a `Refused` message stands for; an unknown code is a plain `Refused`."""
    return _REFUSALS.get(code, Refused)(text, value=value, bound=bound)


def as_ranges(blocks: Sequence[int]) -> str:
    """`[4, 5, 6, 9]` as `4:7, 9:10`, half-open like every span here."""
    spans: list[list[int]] = []
    for block in sorted(set(blocks)):
        if spans and spans[-1][1] == block:
            spans[-1][1] = block + 1
        else:
            spans.append([block, block + 1])
    return ", ".join(f"{start}:{end}" for start, end in spans)
