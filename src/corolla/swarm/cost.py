"""What a route costs: seconds of one step, term by term. Pure; `search.py` adds the terms up.

Every term comes from the view: what a server announces, or what this peer measured itself where it has (`rtt_s`,
`queue_s`, `block_s` of a `ServerView`, link penalties of the `View`; `peers.py` puts them there). What a session is
like, a long prompt or many rows, comes with the cost: `CostModel.for_session`.
"""

from dataclasses import dataclass, replace

from corolla.swarm.announcement import short_peer
from corolla.swarm.view import ServerView, View


@dataclass(frozen=True, slots=True)
class CostModel:
    """The constants: measured by us where we could, else the predecessor's."""

    hop_overhead_s: float = 0.001
    """What a server takes for a step beside compute: 0.85 ms (`docs/performance.md`; predecessor: 18 ms)."""
    no_room_s: float = 10.0
    """Added to a server whose cache cannot hold the session: any other comes first (predecessor: 10 s)."""
    draining_s: float = 100.0
    """Added to a server that is leaving: the last resort, but better than no route."""
    unknown_rtt_s: float = 0.3
    """Assumed for a pair of peers that nobody measured (predecessor: 0.15 s one way)."""
    unreachable_s: float = 5.0
    """Most that one way of any link costs: slow beats no route (predecessor: 5 s)."""
    activation_bytes: float = 16_384.0
    """What one position takes on the way to a server that does not say: of a 70B model in bf16 (of an 8B, half)."""
    positions_per_step: float = 1.0
    """What crosses each link for one step: a decode step's one position, and a share of the prompt (`for_session`)."""
    usual_new_tokens: int = 256
    """Most steps that a prompt's bytes are spread over: few answers fill all the room that a session asks for."""
    session_tokens: int = 0
    """Most tokens a row of the session, which its servers must take; 0: as many as it needs in all (`for_session`)."""
    unknown_tokens_per_s: float = 300.0
    """Assumed of one block on a server that has not measured itself (predecessor: 300)."""
    near_tie: float = 0.05
    """Routes within this share of the best count as equal, so that clients do not all take the same one."""
    switch_gain: float = 0.2
    """A route in use is left only for one that is cheaper by this share, so that clients do not flutter."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if self.unknown_tokens_per_s == 0:
            raise ValueError("unknown_tokens_per_s is 0: no server would ever answer")
        if self.usual_new_tokens < 1:
            raise ValueError(f"usual_new_tokens is {self.usual_new_tokens}; a session has at least one step")

    def for_session(self, *, prompt_tokens: int, max_tokens: int, rows: int = 1) -> "CostModel":
        """The cost of a mean step in a session of up to `max_tokens` a row that begins with a prompt.

        Each position crosses each link once, so the prompt's are spread over the steps that are expected. The first
        new token comes out of the prompt's own step, and the last is never fed back.
        """
        num_steps = max(1, min(max_tokens - prompt_tokens + 1, self.usual_new_tokens))
        positions = rows * (prompt_tokens + num_steps - 1) / num_steps
        return replace(self, positions_per_step=positions, session_tokens=max_tokens)


def one_way_s(cost: CostModel, rtt_s: float | None) -> float:
    """Seconds from one end of a link to the other. A measured 0 is a measurement."""
    return min((cost.unknown_rtt_s if rtt_s is None else rtt_s) / 2, cost.unreachable_s)


def between_s(cost: CostModel, view: View, server: ServerView, following: ServerView) -> float:
    """Seconds from one server to the next: as the first announces it, else as long as the way through the client; and
    what the activations take."""
    announced_s = server.announcement.next_rtts.get(short_peer(following.peer))
    if announced_s is None and server.rtt_s is not None and following.rtt_s is not None:
        seconds = one_way_s(cost, server.rtt_s) + one_way_s(cost, following.rtt_s)
    else:
        seconds = one_way_s(cost, announced_s)
    penalty_s = view.link_penalties_s.get((server.peer, following.peer), 0.0)
    return seconds + transfer_s(cost, server, following) + penalty_s


def transfer_s(cost: CostModel, server: ServerView, following: ServerView) -> float:
    """Seconds that a step's activations take through the link, by what the second has seen come from the first, by its
    model's size, and by how many positions a step carries."""
    said = following.announcement
    bytes_per_s = said.inflows.get(short_peer(server.peer))
    if bytes_per_s is None:
        return 0.0
    step_bytes = cost.positions_per_step * (said.position_bytes or cost.activation_bytes)
    return min(step_bytes / bytes_per_s, cost.unreachable_s)


def queue_s(server: ServerView) -> float:
    """Seconds that a step waits in line there: as measured in its replies, else as announced."""
    return server.announcement.queue_s if server.queue_s is None else server.queue_s


def reserve_s(cost: CostModel, server: ServerView, tokens_needed: int) -> float:
    """The penalty of a server that has no room for a session of this length."""
    is_short = server.longest_session < (cost.session_tokens or tokens_needed)
    has_room = server.announcement.free_cache_tokens >= tokens_needed and not is_short
    return 0.0 if has_room else cost.no_room_s


def leaving_s(cost: CostModel, server: ServerView) -> float:
    """The penalty of a server that is about to go."""
    return cost.draining_s if server.announcement.state == "draining" else 0.0


def entry_s(cost: CostModel, server: ServerView, tokens_needed: int) -> float:
    """Seconds that using a server costs at all, however few of its blocks."""
    return cost.hop_overhead_s + queue_s(server) + reserve_s(cost, server, tokens_needed) + leaving_s(cost, server)


def idle_block_s(cost: CostModel, server: ServerView) -> float:
    """Seconds one token takes in one block of this server, by its own word."""
    tokens_per_s = server.announcement.decode_tokens_per_s
    if tokens_per_s == 0:
        return 1 / cost.unknown_tokens_per_s
    return 1 / (tokens_per_s * (server.end - server.start))


def block_s(cost: CostModel, server: ServerView) -> float:
    """Seconds one token takes in one block of this server under its present load."""
    return idle_block_s(cost, server) if server.block_s is None else server.block_s
