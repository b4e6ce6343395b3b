"""Whom the user wants to be served by, and by whom not. Choices always hold, even where they leave blocks uncovered."""

from collections.abc import Iterable
from dataclasses import dataclass

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import public_key_of
from corolla.swarm.view import ServerView, View


@dataclass(frozen=True, slots=True)
class ServerLists:
    """Servers by peer id, and by how they hold the weights."""

    allowed: frozenset[PeerId] | None = None
    """Only these; None: all."""
    blocked: frozenset[PeerId] = frozenset()
    takes_quantized: bool = True
    """Servers whose weights are held in 8 or 4 bits give other outputs; they say it themselves."""

    def applied(self, view: View) -> View:
        """The view as if the others were not there."""
        allowed = view if self.allowed is None else view.only(self.allowed)
        kept = allowed.without(self.blocked)
        return kept if self.takes_quantized else kept.without(quantized(kept))

    def left_out(self, view: View) -> dict[PeerId, str]:
        """The servers that `applied` takes away, and which choice of the user's each runs into."""
        kept = self.applied(view).servers
        return {peer: self._why_not(server) for peer, server in view.servers.items() if peer not in kept}

    def _why_not(self, server: ServerView) -> str:
        if self.allowed is not None and server.peer not in self.allowed:
            return "not among the servers to use"
        if server.peer in self.blocked:
            return "among the servers not to use"
        return f"holds the weights as {server.announcement.quantization}, which was not wanted"


def quantized(view: View) -> list[PeerId]:
    """The servers that say that they hold the weights in fewer bits."""
    return [peer for peer, server in view.servers.items() if server.announcement.quantization is not None]


def read_lists(allowed: Iterable[str] | None, blocked: Iterable[str] | None, quantization: str = "any") -> ServerLists:
    """The lists from peer ids as a user writes them; None: all, none. `quantization`: `any`, or `none` of it.

    Raises BadInput for what is no peer id, or another word.
    """
    if quantization not in ("any", "none"):
        raise BadInput(f"quantization {quantization!r}: a client takes any, or only servers with none")
    return ServerLists(
        None if allowed is None else frozenset(map(_read_peer, allowed)),
        frozenset(map(_read_peer, blocked or ())),
        takes_quantized=quantization == "any",
    )


def _read_peer(text: str) -> PeerId:
    peer = PeerId(text.strip())
    try:
        public_key_of(peer)
    except ValueError as fault:
        raise BadInput(f"{text[:80]!r} is no peer id as `corolla status --json` shows it: {fault}") from fault
    return peer
