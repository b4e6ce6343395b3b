"""How a route is chosen, on paper: four small swarms, no network, no model.

    python examples/routing.py

A and B both hold all four blocks, 20 ms and 200 ms away, or half of them each. The constants are the predecessor's:
18 ms for every server that is entered, 10 s for one without room, and no time for compute.
"""

from corolla.errors import MissingBlocks
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.cost import CostModel
from corolla.swarm.route import find_route
from corolla.swarm.view import ServerView, View

NO_COMPUTE = 1e12  # tokens a second
COST = CostModel(hop_overhead_s=0.018, no_room_s=10.0, near_tie=0.0)


def server(name: str, start: int, end: int, rtt_s: float, *, free_cache_tokens: int = 4096) -> ServerView:
    said = Announcement(
        state="online",
        start=start,
        end=end,
        num_blocks=4,
        fingerprint=Fingerprint("0" * 32),
        model_name="example",
        dtype="bfloat16",
        decode_tokens_per_s=NO_COMPUTE,
        free_cache_tokens=free_cache_tokens,
    )
    return ServerView(PeerId(name), said, expires_at=0.0, rtt_s=rtt_s)


def show(what: str, servers: list[ServerView], num_blocks: int = 4) -> None:
    try:
        route = find_route(View.of(servers), num_blocks, COST, tokens_needed=1024)
    except MissingBlocks as missing:
        print(f"{what}: MissingBlocks({missing.blocks})")
        return
    hops = ", ".join(f"{hop.peer} {hop.start}:{hop.end}" for hop in route.hops)
    print(f"{what}: {hops} at {route.cost_s:.3f} s")


def main() -> None:
    far = server("B", 0, 4, 0.20)
    show("A's cache is full", [server("A", 0, 4, 0.02, free_cache_tokens=0), far])
    show("A has room", [server("A", 0, 4, 0.02), far])
    halves = [server("A", 0, 2, 0.02), server("B", 2, 4, 0.02)]
    show("two halves", halves)
    show("six blocks over two halves of four", halves, num_blocks=6)


if __name__ == "__main__":
    main()
