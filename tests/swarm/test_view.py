"""A view says at a glance whether a model can be used, and what hangs on one server."""

from typing import Literal

from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.view import ServerView, View


def server(
    name: str,
    start: int,
    end: int,
    *,
    state: Literal["joining", "online", "draining"] = "online",
    num_blocks: int = 6,
) -> ServerView:
    said = Announcement(
        state=state,
        start=start,
        end=end,
        num_blocks=num_blocks,
        fingerprint=Fingerprint("0" * 32),
        model_name="model",
        dtype="float32",
    )
    return ServerView(PeerId(name), said, expires_at=0.0)


def test_every_block_on_two_servers_is_healthy() -> None:
    view = View.of([server("a", 0, 4), server("b", 2, 6), server("c", 0, 2), server("d", 4, 6)])
    assert view.coverage == [2, 2, 2, 2, 2, 2]
    assert (view.health, view.fragile_blocks, view.missing_blocks) == ("healthy", [], [])


def test_a_block_on_one_server_is_fragile() -> None:
    view = View.of([server("a", 0, 6), server("b", 0, 4)])
    assert (view.health, view.fragile_blocks, view.missing_blocks) == ("fragile", [4, 5], [])


def test_a_block_on_no_server_breaks_the_model() -> None:
    view = View.of([server("a", 0, 2), server("b", 3, 6)])
    assert (view.health, view.missing_blocks) == ("broken", [2])
    assert 2 not in view.fragile_blocks


def test_nobody_there_is_broken() -> None:
    view = View.of([])
    assert (view.num_blocks, view.health, view.coverage) == (0, "broken", [])


def test_a_joining_server_covers_nothing_yet() -> None:
    view = View.of([server("a", 0, 6, state="joining")])
    assert view.missing_blocks == [0, 1, 2, 3, 4, 5]


def test_a_draining_server_covers_a_block_but_makes_it_fragile() -> None:
    view = View.of([server("a", 0, 6), server("b", 0, 4), server("c", 4, 6, state="draining")])
    assert (view.missing_blocks, view.fragile_blocks) == ([], [4, 5])
    assert view.without([PeerId("a")]).missing_blocks == []


def test_a_server_that_claims_another_depth_is_left_out() -> None:
    view = View.of([server("a", 0, 6), server("liar", 0, 10_000, num_blocks=10_000), server("b", 0, 6)])
    assert set(view.servers) == {"a", "b"}
    assert view.num_blocks == 6


def test_leaving_servers_out_and_adding_round_trips_changes_copies_only() -> None:
    view = View.of([server("a", 0, 6), server("b", 0, 6)])
    assert set(view.without([PeerId("a"), PeerId("stranger")]).servers) == {"b"}
    measured = view.with_rtts({PeerId("b"): 0.0, PeerId("stranger"): 1.0})
    assert measured.servers[PeerId("b")].rtt_s == 0.0
    assert measured.servers[PeerId("a")].rtt_s is None
    assert view.servers[PeerId("b")].rtt_s is None
    assert set(view.servers) == {"a", "b"}
