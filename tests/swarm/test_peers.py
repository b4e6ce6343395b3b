"""What a client learns by its own dealings: it steers routes, fades with time, and never uncovers a block."""

import math
import random
from collections import Counter

import pytest

from corolla.ids import Fingerprint, PeerId
from corolla.swarm.announcement import Announcement
from corolla.swarm.bans import BanRules
from corolla.swarm.cost import CostModel
from corolla.swarm.load import FADES_IN_S
from corolla.swarm.peers import LINK_PENALTY_HALF_S, LINK_PENALTY_S, MAX_PEERS, PeerBook
from corolla.swarm.rtt import RTT_LIFE_S, Rtt, after_sample, current, pick_to_sample
from corolla.swarm.view import ServerView, View

COST = CostModel()
A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
ALL = range(4)


def server(peer: PeerId, start: int = 0, end: int = 4, *, num_blocks: int = 4) -> ServerView:
    said = Announcement(
        state="online", start=start, end=end, num_blocks=num_blocks, fingerprint=Fingerprint("0" * 32),
        model_name="model", dtype="float32", decode_tokens_per_s=25.0, queue_s=1.0,
    )  # fmt: skip
    return ServerView(peer, said, expires_at=1e9)


TWO = View.of([server(A), server(B)])


def seen(book: PeerBook, view: View, now: float) -> set[str]:
    return set(book.applied(view, range(view.num_blocks), COST, now).servers)


# Bans.


def test_each_fault_doubles_the_ban_up_to_a_bound_and_time_forgets_them() -> None:
    book = PeerBook(BanRules(first_s=15, longest_s=100, forget_half_s=300))
    assert [book.saw_fault(A, 0.0) for _ in range(4)] == pytest.approx([15, 30, 60, 100])
    assert book.faults(A, 600.0) == pytest.approx(1.0)
    assert book.saw_fault(A, 600.0) == pytest.approx(30)
    assert book.saw_fault(B, 1e6) == pytest.approx(15)


def test_a_banned_server_is_left_out_until_its_time_is_over() -> None:
    book = PeerBook()
    book.saw_fault(A, 100.0)
    assert seen(book, TWO, 101.0) == {"B"}
    assert book.banned(101.0) == pytest.approx({"A": 14.0})
    assert seen(book, TWO, 115.1) == {"A", "B"}


def test_a_success_lifts_a_ban_and_its_memory() -> None:
    book = PeerBook()
    book.saw_fault(A, 0.0)
    book.saw_success(A)
    assert seen(book, TWO, 1.0) == {"A", "B"}
    assert book.saw_fault(A, 2.0) == pytest.approx(15)


def test_a_ban_that_would_uncover_a_block_is_ignored() -> None:
    book = PeerBook()
    view = View.of([server(A, 0, 3), server(B, 2, 4), server(C, 3, 4)])
    for peer in (A, B):
        book.saw_fault(peer, 0.0)
    assert seen(book, view, 1.0) == {"A", "C"}


def test_of_two_bans_that_uncover_a_block_together_the_shorter_is_ignored() -> None:
    book = PeerBook()
    book.saw_fault(A, 0.0)
    book.saw_fault(A, 0.0)
    book.saw_fault(B, 0.0)
    assert seen(book, TWO, 1.0) == {"B"}


def test_a_gap_that_no_ban_made_is_left_and_the_other_bans_still_hold() -> None:
    book = PeerBook()
    book.saw_fault(A, 0.0)
    book.saw_fault(C, 0.0)
    view = View.of([server(A, 1, 2), server(B, 1, 2), server(C, 3, 4)])
    assert seen(book, view, 1.0) == {"B", "C"}


def test_a_silent_ping_makes_a_server_far_but_not_banned() -> None:
    book = PeerBook()
    book.saw_no_answer(A, 0.0)
    view = book.applied(TWO, ALL, COST, 1.0)
    assert view.servers[A].rtt_s == math.inf
    assert not book.banned(1.0)


# Links.


def test_a_links_penalty_adds_up_and_halves_with_time() -> None:
    book = PeerBook()
    book.saw_link_fault((A, B), 0.0)
    book.saw_link_fault((A, B), 0.0)
    assert book.applied(TWO, ALL, COST, 0.0).link_penalties_s == pytest.approx({(A, B): 2 * LINK_PENALTY_S})
    later = book.applied(TWO, ALL, COST, LINK_PENALTY_HALF_S)
    assert later.link_penalties_s == pytest.approx({(A, B): LINK_PENALTY_S})
    assert set(later.servers) == {"A", "B"}
    assert not book.applied(TWO, ALL, COST, 3600.0).link_penalties_s


# Load.


def test_replies_say_how_busy_a_server_is_and_fade_into_its_announcement() -> None:
    book = PeerBook()
    book.saw_step(A, queue_s=0.2, compute_s=0.4, num_blocks=4, num_tokens=1, now=0.0)
    fresh = book.applied(TWO, ALL, COST, 0.0).servers[A]
    assert (fresh.queue_s, fresh.block_s) == pytest.approx((0.2, 0.1))
    older = book.applied(TWO, ALL, COST, FADES_IN_S).servers[A]
    weight = math.exp(-1)
    assert older.queue_s == pytest.approx(0.2 * weight + 1.0 * (1 - weight))
    assert older.block_s == pytest.approx(0.1 * weight + 0.01 * (1 - weight))
    assert book.applied(TWO, ALL, COST, 400.0).servers[A].queue_s is None
    assert book.applied(TWO, ALL, COST, 0.0).servers[B].queue_s is None


def test_one_outlier_moves_the_load_a_little_and_a_prefill_says_nothing_of_decode() -> None:
    book = PeerBook()
    book.saw_step(A, queue_s=0.0, compute_s=0.4, num_blocks=4, num_tokens=1, now=0.0)
    book.saw_step(A, queue_s=1.0, compute_s=9.0, num_blocks=4, num_tokens=100, now=0.0)
    load = book.applied(TWO, ALL, COST, 0.0).servers[A]
    assert load.queue_s == pytest.approx(0.3)
    assert load.block_s == pytest.approx(0.1)


def test_a_heartbeats_word_on_the_queue_replaces_the_mean() -> None:
    book = PeerBook()
    book.saw_step(A, queue_s=1.0, compute_s=0.4, num_blocks=4, num_tokens=1, now=0.0)
    book.saw_queue(A, 0.25, 1.0)
    load = book.applied(TWO, ALL, COST, 1.0).servers[A]
    assert (load.queue_s, load.block_s) == pytest.approx((0.25, 0.1))


# Round trips.


def test_round_trips_are_smoothed_the_more_the_fresher_the_old_one_is() -> None:
    old = Rtt(0.1, at=0.0)
    assert after_sample(old, 0.2, 1.0).rtt_s == pytest.approx(0.12)
    assert after_sample(old, 0.2, RTT_LIFE_S / 2).rtt_s == pytest.approx(0.15)
    assert after_sample(old, 0.2, 10 * RTT_LIFE_S).rtt_s == pytest.approx(0.2)
    assert after_sample(old, math.inf, 1.0).rtt_s == math.inf
    assert after_sample(Rtt(math.inf, 0.0), 0.2, 1.0).rtt_s == pytest.approx(0.2)


def test_an_old_round_trip_says_nothing_any_more() -> None:
    rtts = {A: Rtt(0.1, at=0.0), B: Rtt(0.0, at=100.0)}
    assert current(rtts, RTT_LIFE_S + 1) == {B: 0.0}


def test_both_ends_and_the_middle_are_sampled_and_the_longest_unmeasured_first() -> None:
    spans = {"start": (0, 10), "middle": (10, 20), "end": (20, 30)}
    servers = [
        server(PeerId(f"{place}{number}"), start, end, num_blocks=30)
        for place, (start, end) in spans.items()
        for number in range(30)
    ]
    view, rng = View.of(servers), random.Random(0)
    book = PeerBook()
    for round_no in range(8):
        picked = pick_to_sample(view, range(30), book.rtts, rng)
        assert Counter(peer.rstrip("0123456789") for peer in picked) == {"start": 4, "middle": 4, "end": 4}
        for peer in picked:
            book.saw_rtt(peer, 0.1, float(round_no))
    assert len(book.rtts) == 90


def test_a_small_group_leaves_its_share_to_the_others() -> None:
    servers = [server(PeerId(f"peer{number}"), 0, 2) for number in range(20)] + [server(A, 2, 4)]
    picked = pick_to_sample(View.of(servers), ALL, {}, random.Random(0))
    assert len(picked) == 12
    assert A in picked


def test_invented_peers_cost_no_memory() -> None:
    book = PeerBook()
    for number in range(2 * MAX_PEERS):
        book.saw_rtt(PeerId(f"peer{number}"), 0.1, float(number))
    assert len(book.rtts) <= MAX_PEERS
    assert PeerId(f"peer{2 * MAX_PEERS - 1}") in book.rtts


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 0.0), (math.nan, 1.0, 1.0)])
def test_rules_that_make_no_sense_are_refused(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="first_s"):
        BanRules(*bad)
