"""Whom the user wants to be served by, and by whom not. Lists always hold, even where they leave blocks uncovered."""

from collections.abc import Iterable
from dataclasses import dataclass

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import public_key_of
from corolla.swarm.view import View


@dataclass(frozen=True, slots=True)
class ServerLists:
    """Servers by peer id."""

    allowed: frozenset[PeerId] | None = None
    """Only these; None: all."""
    blocked: frozenset[PeerId] = frozenset()

    def applied(self, view: View) -> View:
        """The view as if the others were not there."""
        allowed = view if self.allowed is None else view.only(self.allowed)
        return allowed.without(self.blocked)


def read_lists(allowed: Iterable[str] | None, blocked: Iterable[str] | None) -> ServerLists:
    """The lists from peer ids as a user writes them; None: all, none. Raises BadInput for what is no peer id."""
    return ServerLists(
        None if allowed is None else frozenset(map(_read_peer, allowed)), frozenset(map(_read_peer, blocked or ()))
    )


def _read_peer(text: str) -> PeerId:
    peer = PeerId(text.strip())
    try:
        public_key_of(peer)
    except ValueError as fault:
        raise BadInput(f"{text[:80]!r} is no peer id as `corolla status --json` shows it: {fault}") from fault
    return peer
