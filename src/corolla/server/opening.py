"""Whether what an `Open` asks for can be granted at all, and the session as it begins. Pure: nothing is held here."""

from corolla.errors import Overloaded, Unsupported
from corolla.ids import Fingerprint, PeerId
from corolla.server.admission import AdmissionLimits, Cap
from corolla.server.config import SessionLimits
from corolla.server.kv import PAGE_TOKENS
from corolla.server.runner import SpanFacts
from corolla.server.session import SessionState
from corolla.wire.messages import Open


def check_open(ask: Open, facts: SpanFacts, limits: SessionLimits, fingerprint: Fingerprint) -> None:
    """Raises Unsupported when this server can never hold such a session, Overloaded when it has other blocks."""
    if ask.fingerprint != fingerprint:
        raise Unsupported(
            f"this server's model has the fingerprint {fingerprint}, yours {ask.fingerprint}: "
            "other weights under the same name",
            value=ask.fingerprint, bound=fingerprint,
        )  # fmt: skip
    check_blocks(ask, facts)
    if ask.max_tokens > limits.max_session_tokens:
        raise _out_of_bounds("a session of tokens", str(ask.max_tokens), str(limits.max_session_tokens))
    if ask.max_rows > limits.max_rows:
        raise _out_of_bounds("rows", str(ask.max_rows), str(limits.max_rows))
    if ask.wire_dtype == "int64":
        raise _out_of_bounds("hidden states as", ask.wire_dtype, "float32, bfloat16 or float16")
    if ask.adapter is not None:
        raise _out_of_bounds("adapter", ask.adapter, "none")


def check_blocks(ask: Open, facts: SpanFacts) -> None:
    """Raises Overloaded when not all of the blocks are hosted here: most often we have moved.

    The client has yet to hear of it: that is no mistake of its own, and others have these blocks.
    """
    asked, hosted = f"{ask.start}:{ask.end}", f"{facts.start}:{facts.end}"
    if ask.start >= ask.end:
        raise _out_of_bounds("blocks", asked, hosted)
    if not facts.start <= ask.start < ask.end <= facts.end:
        raise Overloaded(f"blocks {asked}: this server has {hosted}", value=asked, bound=hosted)


def check_way(ask: Open, *, own_peer: PeerId, client: PeerId) -> None:
    """Raises Unsupported for a place on a route that makes no sense."""
    if own_peer in (ask.upstream, ask.next):
        raise Unsupported("a hop cannot be its own neighbour", value=own_peer, bound="another peer")
    if ask.next == client:
        raise Unsupported(
            "outputs for the client go back on its own stream: leave `next` out",
            value=client,
            bound="a server, or none",
        )


def state_of(ask: Open, facts: SpanFacts, limits: SessionLimits, client: PeerId) -> SessionState:
    """The session before its first step."""
    return SessionState(
        session=ask.session,
        owner=client,
        upstream=ask.upstream,
        route_version=ask.route_version,
        max_tokens=ask.max_tokens,
        max_rows=ask.max_rows,
        max_chunk_tokens=limits.max_chunk_tokens,
        hidden_size=facts.hidden_size,
        needs_token_ids=facts.needs_token_ids,
        can_trim=facts.can_trim,
        prefill_in_chunks=facts.prefill_in_chunks,
    )


def caps_of(limits: SessionLimits, cache_pages: int) -> AdmissionLimits:
    """What one client and one address may take of this server.

    One client: half of the cache, or one session of the longest kind. One address, and all together: several times
    the cache, since what does not fit waits in line for it.
    """
    tokens = max(cache_pages * PAGE_TOKENS, 1)
    peer = max(tokens // 2, min(tokens, limits.max_session_tokens))
    sessions = limits.max_sessions
    return AdmissionLimits(
        sessions=Cap(
            peer=min(limits.max_sessions_per_peer, sessions),
            group=max(min(limits.max_sessions_per_peer, sessions), sessions * 3 // 4),
            total=sessions,
        ),
        leased_tokens=Cap(peer=peer, group=3 * tokens, total=4 * tokens),
    )


def _out_of_bounds(what: str, value: str, bound: str) -> Unsupported:
    return Unsupported(f"{what} {value}: this server takes {bound}", value=value, bound=bound)
