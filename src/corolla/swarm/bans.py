"""When a server may be asked again after it failed. How long each time is `net/bans.py`. Pure.

A ban answers only to this peer's own evidence of the server's fault (a reset, silence, a wrong shape): a refusal, a
caller's mistake or a neighbour's word never makes one. A success lifts it at once.
"""

from collections.abc import Iterable, Mapping

from corolla.ids import PeerId
from corolla.net.bans import Ban as Ban
from corolla.net.bans import BanRules as BanRules
from corolla.net.bans import after_fault as after_fault
from corolla.net.bans import remembered as remembered
from corolla.swarm.view import View


def without_banned(view: View, bans: Mapping[PeerId, Ban], blocks: range, now: float) -> View:
    """The view without banned servers; where that would uncover a block, those that come free soonest stay."""
    banned = {peer: ban.until for peer, ban in bans.items() if ban.until > now and peer in view.servers}
    if not banned:
        return view
    needed: set[PeerId] = set()
    while lacking := _uncovered(view, banned.keys() - needed, blocks):
        peer = min(
            _hosts(view, banned.keys() - needed, lacking[0]), key=lambda peer: (banned[peer], peer), default=None
        )
        if peer is None:
            blocks = range(lacking[0] + 1, blocks.stop)  # nobody at all hosts this one
        else:
            needed.add(peer)
    return view.without(banned.keys() - needed)


def _uncovered(view: View, gone: Iterable[PeerId], blocks: range) -> list[int]:
    missing = set(view.without(gone).missing_blocks)
    return [block for block in blocks if block in missing]


def _hosts(view: View, peers: Iterable[PeerId], block: int) -> list[PeerId]:
    servers = (view.servers[peer] for peer in peers)
    return [server.peer for server in servers if server.is_usable and server.start <= block < server.end]
