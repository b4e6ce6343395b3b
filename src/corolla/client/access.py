"""What a session needs of the swarm it runs on; `client/swarm.py` is it."""

from typing import Protocol

from corolla.client.hop import ServerLink
from corolla.client.journals import Journals
from corolla.client.router import Router, ServedModel
from corolla.ids import PeerId
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Route


class SwarmAccess(Protocol):
    @property
    def own_peer(self) -> PeerId: ...

    async def find_route(
        self, model: ServedModel, *, blocks: range, tokens_needed: int, without: frozenset[PeerId], cost: CostModel,
        alone: bool = False,
    ) -> Route: ...  # fmt: skip

    async def link(self, peer: PeerId) -> ServerLink: ...

    def router(self, model: ServedModel) -> Router:
        """Told of what the session sees of servers."""
        ...

    @property
    def journals(self) -> Journals:
        """Bounds what all sessions keep."""
        ...
