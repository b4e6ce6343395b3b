"""Caps: a burst passes, a flood does not; strangers leave listed peers their share; all that is taken comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput, Overloaded
from corolla.ids import PeerId
from corolla.net.buckets import Buckets, Rate
from corolla.net.groups import group_of
from corolla.net.guard import StreamGuard, StreamLimits
from corolla.server.admission import Admission, AdmissionLimits, Cap, Guest
from corolla.server.config import SessionLimits
from corolla.server.control import MAX_CONTROL_STREAMS_PER_PEER

LIMITS = AdmissionLimits(
    peer_opens=Rate(per_s=1, burst=2),
    group_opens=Rate(per_s=2, burst=5),
    sessions=Cap(peer=3, group=5, total=8),
    leased_tokens=Cap(peer=100, group=150, total=200),
    bytes_in_flight=Cap(peer=10, group=30, total=40),
)
FRIEND = PeerId("friend")


def admission() -> Admission:
    return Admission(LIMITS, frozenset({FRIEND}))


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    buckets = Buckets(Rate(per_s=2, burst=3))
    assert [buckets.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [buckets.take("a", 0.5) for _ in range(2)] == [True, False]
    assert buckets.take("b", 0.5)
    assert [buckets.take("a", 100.0) for _ in range(4)] == [True, True, True, False]


@given(st.lists(st.floats(0, 20), max_size=200))
def test_no_pattern_of_asking_gets_more_than_burst_and_rate(pauses: list[float]) -> None:
    buckets, now, taken = Buckets(Rate(per_s=3, burst=5)), 0.0, 0
    for pause_s in pauses:
        now += pause_s / 10
        taken += buckets.take("a", now)
    assert taken <= 5 + 3 * now + 1e-6


def test_what_is_remembered_is_bounded_and_forgotten_when_quiet() -> None:
    buckets = Buckets(Rate(per_s=1, burst=2), limit=100)
    assert sum(buckets.take(f"peer{number}", 0.0) for number in range(1000)) == 100
    assert sum(buckets.take(f"other{number}", 5.0) for number in range(1000)) == 100


def test_one_client_opens_no_more_than_its_rate_and_others_are_not_held_up() -> None:
    caps = admission()
    flood, calm = caps.guest(PeerId("flood"), "192.0.2.1"), caps.guest(PeerId("calm"), "198.51.100.1")
    for _ in range(2):
        caps.admit_open(flood, 1, 0.0)
    with pytest.raises(Overloaded, match="one client") as refused:
        caps.admit_open(flood, 1, 0.0)
    assert refused.value.bound == "1/s"
    caps.admit_open(calm, 1, 0.0)
    caps.admit_open(flood, 1, 1.0)


def test_many_names_at_one_address_share_its_rate() -> None:
    caps = admission()
    for number in range(5):
        guest = caps.guest(PeerId(f"name{number}"), f"192.0.2.{number}")
        caps.admit_open(guest, 1, 0.0)
        caps.close_session(guest, 1)
    with pytest.raises(Overloaded, match="one address"):
        caps.admit_open(caps.guest(PeerId("name5"), "192.0.2.99"), 1, 0.0)
    caps.admit_open(caps.guest(PeerId("elsewhere"), "192.0.3.1"), 1, 0.0)
    caps.admit_open(caps.guest(PeerId("unknown"), None), 1, 0.0)


def test_new_routes_of_held_sessions_have_a_rate_of_their_own_by_peer_and_by_address() -> None:
    caps = Admission(AdmissionLimits(peer_routes=Rate(per_s=1, burst=3), group_routes=Rate(per_s=1, burst=4)))
    busy, next_door = caps.guest(PeerId("busy"), "192.0.2.1"), caps.guest(PeerId("next door"), "192.0.2.2")
    for _ in range(3):
        caps.admit_route(busy, 0.0)
    with pytest.raises(Overloaded, match="new routes by one client"):
        caps.admit_route(busy, 0.0)
    caps.admit_open(busy, 1, 0.0)
    caps.admit_route(next_door, 0.0)
    with pytest.raises(Overloaded, match="new routes by one address"):
        caps.admit_route(next_door, 0.0)
    caps.admit_route(caps.guest(PeerId("elsewhere"), "198.51.100.1"), 0.0)


def test_all_sessions_of_a_client_may_be_re_routed_at_once_and_more_than_once() -> None:
    caps = Admission()
    client = caps.guest(PeerId("client"), "192.0.2.1")
    for _ in range(8 * caps.limits.sessions.peer):
        caps.admit_route(client, 0.0)


def test_the_caps_name_value_and_bound_and_take_nothing_when_they_refuse() -> None:
    caps = admission()
    guest = caps.guest(PeerId("a"), "192.0.2.1")
    caps.admit_open(guest, 90, 0.0)
    with pytest.raises(Overloaded, match="leased tokens of one client") as refused:
        caps.admit_open(guest, 11, 10.0)
    assert (refused.value.value, refused.value.bound) == ("101", "100")
    assert (caps.sessions.total, caps.leased_tokens.total) == (1, 90)
    caps.close_session(guest, 90)
    caps.admit_open(guest, 100, 20.0)


def test_strangers_cannot_take_what_is_reserved_for_listed_peers() -> None:
    caps = admission()
    for number in range(6):
        caps.admit_open(caps.guest(PeerId(f"p{number}"), f"10.0.{number}.1"), 1, float(number))
    with pytest.raises(Overloaded, match=r"sessions in all: 7, at most 6"):
        caps.admit_open(caps.guest(PeerId("p6"), "10.0.6.1"), 1, 7.0)
    caps.admit_open(caps.guest(FRIEND, "10.0.6.1"), 1, 8.0)


def test_nothing_is_kept_back_for_nobody() -> None:
    caps = Admission(LIMITS)
    for number in range(8):
        caps.admit_open(caps.guest(PeerId(f"p{number}"), f"10.0.{number}.1"), 1, 0.0)


def test_a_listed_peer_is_not_held_to_its_address_but_to_its_own_cap() -> None:
    caps = admission()
    for number in range(3):
        caps.bytes_in_flight.take(caps.guest(PeerId(f"p{number}"), "192.0.2.1"), 10)
    with pytest.raises(Overloaded, match="one address"):
        caps.bytes_in_flight.take(caps.guest(PeerId("p3"), "192.0.2.1"), 1)
    friend = caps.guest(FRIEND, "192.0.2.1")
    caps.bytes_in_flight.take(friend, 10)
    with pytest.raises(Overloaded, match="one client"):
        caps.bytes_in_flight.take(friend, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([None, "192.0.2.1", "2001:db8::1"]), st.integers(1, 9)))
)
def test_all_that_is_taken_and_given_back_leaves_nothing(asks: list[tuple[str, str | None, int]]) -> None:
    caps, held = admission(), list[tuple[Guest, int]]()
    for name, address, amount in asks:
        guest = caps.guest(PeerId(name), address)
        try:
            caps.bytes_in_flight.take(guest, amount)
        except Overloaded:
            continue
        held.append((guest, amount))
        assert caps.bytes_in_flight.total <= LIMITS.bytes_in_flight.total
        assert caps.bytes_in_flight.held_by(guest.peer) <= LIMITS.bytes_in_flight.peer
    for guest, amount in held:
        caps.bytes_in_flight.give_back(guest, amount)
    assert caps.bytes_in_flight.total == 0
    assert not caps.bytes_in_flight._by_peer
    assert not caps.bytes_in_flight._by_group


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:7:8::9", "2001:db8:7::/48"),
        ("127.0.0.1", "127.0.0.0/24"),
        ("nonsense", None),
        (None, None),
    ],
)
def test_addresses_fall_into_the_groups_that_a_customer_gets(address: str | None, group: str | None) -> None:
    assert group_of(address) == group


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in (lambda: Rate(0, 1), lambda: Rate(1, 0.5), lambda: Cap(2, 1, 3), lambda: AdmissionLimits(reserved=1)):
        with pytest.raises(BadInput):
            wrong()


def test_nobody_who_keeps_to_the_caps_meets_the_bounds_on_streams() -> None:
    """`net/guard.py` knows nothing of sessions; its defaults must leave room for all that a server grants."""
    streams, caps, limits = StreamLimits(), AdmissionLimits(), SessionLimits()
    clients_most = 2 * limits.max_sessions_per_peer + MAX_CONTROL_STREAMS_PER_PEER  # of the route before, and the new
    server_before_most = 2 * limits.max_sessions  # it pushes for everybody, and all may be re-routed at once
    pings = 12
    assert max(clients_most, server_before_most) + pings <= streams.peer.burst
    assert caps.peer_opens.per_s * 2 <= streams.peer.per_s
    assert caps.group_opens.per_s <= streams.peer.per_s  # a server before us passes on what an address opens
    assert 4 * streams.peer.burst <= streams.group.burst
    assert 2 * caps.group_opens.per_s <= streams.group.per_s
    guard = StreamGuard()
    for number in range(clients_most + server_before_most):
        peer = PeerId("server before" if number < server_before_most else "client")
        assert guard.judge(peer, "192.0.2.1", 0.0) == "take"
