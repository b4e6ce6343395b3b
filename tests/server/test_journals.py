"""All journals of a server together stay within its bound, and those give first who hold most."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.ids import PeerId
from corolla.net.groups import AddressGroup
from corolla.server import server
from corolla.server.admission import Guest
from corolla.server.config import ServerConfig, SessionLimits
from corolla.server.journals import Journals
from corolla.server.memory import LEAST_JOURNAL_BYTES, headroom, journal_room
from corolla.server.push import Push
from corolla.wire.messages import Output, Step
from corolla.wire.tensors import WireTensor

GIB = 1 << 30
TOKEN_BYTES = 16
MOST = 100 * TOKEN_BYTES


def hidden(tokens: int) -> WireTensor:
    return WireTensor("float32", (1, tokens, 4), bytes(TOKEN_BYTES * tokens))


class Writer:
    """One session, as the device thread has it."""

    def __init__(self, journals: Journals, guest: Guest, *, is_tail: bool = False, exact: bool = False) -> None:
        self.push = Push()
        self.push.reset(exact=exact)
        self.push.is_tail = is_tail
        self._journals, self._guest = journals, guest
        self._step_no = self._position = 0

    def write(self, tokens: int, *, replay: bool = False) -> None:
        if self.push.is_tail:
            self.push.skip(self._position + tokens)
            self.push.answer(Output(step_no=self._step_no, position=self._position + tokens, hidden=hidden(tokens)))
        else:
            self.push.onward(Step(step_no=self._step_no, position=self._position, hidden=hidden(tokens), replay=replay))
        self._position += tokens
        self._step_no += 1
        self._journals.saw(self.push, self._guest)

    def end(self) -> None:
        self.push.is_over = True
        self._journals.forget(self.push)


def guest(peer: str, group: str | None = None, *, is_listed: bool = False) -> Guest:
    return Guest(PeerId(peer), None if group is None else AddressGroup(group), is_listed)


GUESTS = [guest("a"), guest("b", "home"), guest("c", "home"), guest("d", "home", is_listed=True)]


@settings(max_examples=25)
@given(st.data())
def test_whatever_sessions_come_write_and_end_their_journals_stay_within_the_bound(data: st.DataObject) -> None:
    journals, writers = Journals(MOST), list[Writer]()
    for _ in range(data.draw(st.integers(1, 40))):
        if not writers or data.draw(st.integers(0, 5)) == 0:
            kind = data.draw(st.sampled_from(["tail", "exact", "usual"]))
            chosen = data.draw(st.sampled_from(GUESTS))
            writers.append(Writer(journals, chosen, is_tail=kind == "tail", exact=kind == "exact"))
        writer = data.draw(st.sampled_from(writers))
        if data.draw(st.integers(0, 9)) == 0:
            writer.end()
            writers.remove(writer)
        else:
            writer.write(data.draw(st.integers(1, 40)), replay=data.draw(st.booleans()))
        assert journals.total_bytes == sum(writer.push.nbytes for writer in writers)
        assert journals.total_bytes <= MOST or not any(writer.push.can_shed for writer in writers)
    for writer in writers:
        writer.end()
        writer.write(1)  # was in line still
    assert journals.total_bytes == 0
    assert not journals._held
    assert not journals._by_peer
    assert not journals._by_group


def test_the_client_with_many_sessions_gives_and_the_one_with_a_single_longer_one_keeps_its_whole() -> None:
    journals = Journals(MOST)
    honest = Writer(journals, guest("honest"))
    greedy = [Writer(journals, guest("greedy")) for _ in range(4)]
    for _ in range(30):
        honest.write(1)
    for _ in range(40):
        for writer in greedy:
            writer.write(1)
    assert not honest.push.has_gap
    assert journals.total_bytes <= MOST
    assert all(writer.push.can_shed for writer in greedy), "the newest steps can still be sent again as they were"


def test_many_peers_of_one_address_give_before_one_of_another() -> None:
    journals = Journals(MOST)
    alone, listed = Writer(journals, guest("e", "other")), Writer(journals, guest("d", "home", is_listed=True))
    crowd = [Writer(journals, guest(f"p{number}", "home")) for number in range(8)]
    for writer in (alone, listed):
        writer.write(9)
        for _ in range(21):
            writer.write(1)
    for _ in range(40):
        for writer in crowd:
            writer.write(1)
    assert not alone.push.has_gap
    assert not listed.push.has_gap


def test_a_session_that_has_a_gap_already_gives_before_a_longer_one_of_the_same_client() -> None:
    journals = Journals(MOST)
    first, second = (Writer(journals, GUESTS[0]) for _ in range(2))
    for _ in range(60):
        first.write(1)
    for _ in range(70):
        second.write(1)
    assert (first.push.has_gap, second.push.has_gap) == (True, False)
    for _ in range(60):
        first.write(1)
    assert not second.push.has_gap
    assert journals.num_shed >= 2


def test_a_tails_kept_replies_count_and_the_newest_stays() -> None:
    journals = Journals(MOST)
    tails = [Writer(journals, GUESTS[0], is_tail=True) for _ in range(4)]
    for _ in range(5):
        for tail in tails:
            tail.write(20)
            assert journals.total_bytes <= MOST
            assert tail.push.nbytes >= 20 * TOKEN_BYTES


def test_what_journals_may_take_follows_from_the_memory_of_the_machine() -> None:
    assert journal_room(64 * GIB, is_shared=False) == 16 * GIB
    assert journal_room(8 * GIB, is_shared=True) * 2 == headroom(8 * GIB)
    assert journal_room(0, is_shared=False) == LEAST_JOURNAL_BYTES


def test_a_server_starts_with_its_share_and_never_with_more_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "free_memory_bytes", lambda device: {"cpu": 8 * GIB}[device])
    for device, most in (("cuda:0", 2 * GIB), ("cpu", headroom(8 * GIB) // 2), ("mps", headroom(8 * GIB) // 2)):
        assert server._within_machine(ServerConfig(model="m", device=device)).limits.max_journal_bytes == most
    told = ServerConfig(model="m", limits=SessionLimits(max_journal_bytes=5))
    assert server._within_machine(told).limits.max_journal_bytes == 5
