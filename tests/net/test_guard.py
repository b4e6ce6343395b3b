"""Streams that others open: an honest peer never meets a bound, a flood is closed and then cut off, for ever longer."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.ids import PeerId
from corolla.net.buckets import Rate
from corolla.net.guard import StreamGuard, StreamLimits, Verdict

PEER, OTHER, FRIEND = PeerId("peer"), PeerId("other"), PeerId("friend")
HERE, ELSEWHERE = "192.0.2.1", "198.51.100.1"
SMALL = StreamLimits(
    peer=Rate(per_s=1, burst=10),
    group=Rate(per_s=2, burst=15),
    nonsense=5,
    refused=Rate(per_s=0.1, burst=3),
)


def judged(guard: StreamGuard, times: int, now: float, *, peer: PeerId = PEER, address: str = HERE) -> list[Verdict]:
    return [guard.judge(peer, address, now) for _ in range(times)]


def test_beyond_its_burst_a_peers_streams_are_closed_and_then_it_is_cut_off() -> None:
    guard = StreamGuard(SMALL)
    assert judged(guard, 15, 0.0) == ["take"] * 10 + ["close"] * 3 + ["cut"] * 2
    assert guard.turned_away == {"close": 3, "cut": 2}
    assert judged(guard, 1, 0.0, peer=OTHER, address=ELSEWHERE) == ["take"]


def test_a_pause_in_time_is_enough_not_to_be_cut_off() -> None:
    guard = StreamGuard(SMALL)
    judged(guard, 12, 0.0)
    assert judged(guard, 5, 5.0) == ["take"] * 5


def test_each_time_it_stays_cut_off_for_longer_and_that_fades() -> None:
    guard, now, lengths = StreamGuard(SMALL), 0.0, list[float]()
    for _ in range(3):
        while guard.judge(PEER, None, now) != "cut":
            pass
        began = now
        while guard.is_cut_off(PEER, now):
            now += 1
        lengths.append(now - began)
    assert lengths == sorted(set(lengths))
    assert lengths[0] == SMALL.cut.first_s
    now += 20 * SMALL.cut.forget_half_s
    while guard.judge(PEER, None, now) != "cut":
        pass
    assert not guard.is_cut_off(PEER, now + SMALL.cut.first_s + 1)


def test_who_holds_as_many_streams_as_anyone_may_need_opens_no_more() -> None:
    guard = StreamGuard(SMALL)
    assert guard.judge(PEER, HERE, 0.0, num_open=9) == "take"
    assert guard.judge(PEER, HERE, 0.0, num_open=10) == "close"
    assert guard.judge(OTHER, HERE, 0.0, num_open=9) == "take"


def test_nonsense_counts_as_many_streams() -> None:
    guard = StreamGuard(SMALL)
    verdicts: list[Verdict] = []
    while "cut" not in verdicts:
        verdicts += [guard.judge(PEER, HERE, 0.0), guard.saw_nonsense(PEER, HERE, 0.0)]
    assert verdicts.count("take") <= 2 * SMALL.peer.burst / SMALL.nonsense + 1
    assert guard.saw_nonsense(PEER, HERE, 0.0) == "cut"


def test_an_address_with_many_identities_gets_no_more_than_its_share_and_neighbours_are_not_cut_off() -> None:
    guard = StreamGuard(SMALL)
    taken = [guard.judge(PeerId(f"id {number}"), HERE, 0.0) for number in range(100)]
    assert taken == ["take"] * 15 + ["close"] * 85
    assert judged(guard, 10, 0.0) == ["close"] * 10  # it cannot be told from the others
    assert judged(guard, 1, 0.0, address=ELSEWHERE, peer=OTHER) == ["take"]


def test_listed_peers_keep_their_share_while_their_network_floods_and_are_never_cut_off() -> None:
    guard = StreamGuard(SMALL, frozenset({FRIEND}))
    for number in range(100):
        guard.judge(PeerId(f"id {number}"), HERE, 0.0)
    assert judged(guard, 20, 0.0, peer=FRIEND) == ["take"] * 10 + ["close"] * 10
    assert judged(guard, 1, 1.0, peer=FRIEND) == ["take"]


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=300))
def test_no_pattern_gets_more_than_burst_and_rate(pattern: list[tuple[float, bool]]) -> None:
    guard, now, spent = StreamGuard(SMALL), 0.0, 0.0
    for pause_s, is_nonsense in pattern:
        now += pause_s
        if guard.judge(PEER, None, now) == "take":
            spent += 1
            if is_nonsense and guard.saw_nonsense(PEER, None, now) == "take":
                spent += SMALL.nonsense - 1
    assert spent <= SMALL.peer.burst + SMALL.peer.per_s * now + 1e-6
