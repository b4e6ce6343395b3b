"""Places for records: floods displace themselves, whoever was there stays, and newcomers get in."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.net.places import DISPLACING, OURS, Places

KEY = "key"
FLOOD, OTHER = AddressGroup("198.51.100.0/24"), AddressGroup("192.0.2.0/24")
RENEW_S = 45


@dataclass
class Table:
    """Places with their holders, as a storing peer has them."""

    places: Places[str]
    held: set[tuple[str, PeerId]] = field(default_factory=set)

    def store(self, name: str, group: AddressGroup, now: float, key: str = KEY) -> bool:
        peer = PeerId(name)
        if (key, peer) in self.held:
            self.places.renew(key, peer, group, by_itself=True)
            return True
        displaced = self.places.admit(key, peer, group, now)
        if displaced is None:
            return False
        self.held.difference_update(displaced)
        self.held.add((key, peer))
        return True

    def has(self, name: str) -> bool:
        return (KEY, PeerId(name)) in self.held


def table(max_per_key: int = 50, max_in_all: int = 200) -> Table:
    return Table(Places(random.Random(1), max_per_key=max_per_key, max_in_all=max_in_all))


def fill(into: Table, group: AddressGroup, count: int, now: float = 0.0, key: str = KEY) -> None:
    for number in range(count):
        into.store(f"{group} {number}", group, now, key)


def test_while_there_is_room_everybody_gets_a_place() -> None:
    a = table()
    fill(a, FLOOD, 50)
    assert len(a.places) == len(a.held) == 50


def test_a_flood_displaces_itself_and_none_of_the_others() -> None:
    a, now = table(), 0.0
    for number in range(10):
        assert a.store(f"honest {number}", AddressGroup(f"10.0.{number}.0/24"), now)
    for number in range(5000):
        now += 0.01
        a.store(f"sybil {number}", FLOOD, now)
    assert all(a.has(f"honest {number}") for number in range(10))
    assert len(a.held) == len(a.places) == 50


def test_a_newcomer_from_elsewhere_gets_in_at_once_although_the_flood_was_first() -> None:
    a = table()
    fill(a, FLOOD, 500)
    for number in range(10):
        assert a.store(f"honest {number}", AddressGroup(f"10.0.{number}.0/24"), 1.0)
    assert all(a.has(f"honest {number}") for number in range(10))


def test_a_newcomer_from_the_flooding_group_gets_in_and_most_often_stays() -> None:
    """The flood never renews and has all 500 places; ten honest servers of its own /24 come one after the other."""
    a, now, stayed = table(max_per_key=500, max_in_all=20_000), 0.0, 0
    fill(a, FLOOD, 500)
    for number in range(10):
        now += 10.0
        assert a.store(f"honest {number}", FLOOD, now)
        for tick in range(RENEW_S * 20):
            a.store(f"sybil {number} {tick}", FLOOD, now := now + 0.05)
        stayed += a.has(f"honest {number}")
        if a.has(f"honest {number}"):
            a.store(f"honest {number}", FLOOD, now)
    assert stayed >= 7
    for tick in range(20_000):
        a.store(f"sybil {tick}", FLOOD, now := now + 0.05)
    assert sum(a.has(f"honest {number}") for number in range(10)) == stayed  # renewed ones are safe from fresh ones


def test_of_two_groups_that_hold_most_a_newcomer_displaces_its_own() -> None:
    a = table()
    fill(a, FLOOD, 25)
    fill(a, OTHER, 25)
    for number in range(16):
        assert a.store(f"more {number}", FLOOD, 1.0)
    assert sum(a.has(f"{OTHER} {number}") for number in range(25)) == 25


def test_one_group_displaces_only_slowly() -> None:
    a = table()
    fill(a, FLOOD, 50)
    taken = sum(a.store(f"other {number}", OTHER, now=number / 100) for number in range(1000))
    assert taken <= DISPLACING.burst + DISPLACING.per_s * 10


def test_when_everybody_comes_from_elsewhere_those_who_renew_stay() -> None:
    """More honest servers than places: a stable sample of them is kept, in place of a churning one."""
    a = table()
    for number in range(50):
        a.store(f"first {number}", AddressGroup(f"10.0.{number}.0/24"), 0.0)
        a.store(f"first {number}", AddressGroup(f"10.0.{number}.0/24"), 0.0)
    for number in range(500):
        a.store(f"late {number}", AddressGroup(f"10.1.{number}.0/24"), float(number))
    assert sum(a.has(f"first {number}") for number in range(50)) == 49


def test_many_full_keys_do_not_keep_other_keys_empty() -> None:
    a = table()
    for key in "abcdefgh":
        fill(a, FLOOD, 50, key=key)
    assert len(a.held) == 200
    assert a.store("honest", OTHER, 1.0, key="new")
    assert len(a.held) == 200


def test_what_this_peer_publishes_itself_is_never_displaced() -> None:
    a = table(max_per_key=5)
    for number in range(5):
        assert a.store(f"own {number}", OURS, 0.0)
    assert not a.store("stranger", FLOOD, 0.0)
    assert sum(a.has(f"own {number}") for number in range(5)) == 5


def test_a_record_brought_by_a_stranger_counts_for_its_peer_once_that_renews_it() -> None:
    a = table(max_per_key=4)
    a.store("honest", FLOOD, 0.0)  # copied here by the flooder
    a.places.renew(KEY, PeerId("honest"), FLOOD, by_itself=False)
    a.places.renew(KEY, PeerId("honest"), OTHER, by_itself=True)
    for number in range(100):
        a.store(f"sybil {number}", FLOOD, float(number))
        assert a.has("honest")


steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.sampled_from([FLOOD, OTHER, OURS]), st.booleans())
)


@given(steps)
def test_the_bounds_hold_and_the_count_is_true_whatever_happens(
    asked: list[tuple[str, int, AddressGroup, bool]],
) -> None:
    a, now = table(max_per_key=4, max_in_all=6), 0.0
    for key, number, group, leaves in asked:
        now += 0.5
        place = (key, PeerId(str(number)))
        if leaves and place in a.held:
            a.places.leave(*place)
            a.held.discard(place)
        else:
            a.store(str(number), group, now, key)
        assert len(a.places) == len(a.held) <= 6
        assert all(sum(held == key for held, _ in a.held) <= 4 for key in "ab")
