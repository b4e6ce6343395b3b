"""Who of several clients asks for much, and when that may run. Pure; a part of the scheduler.

A client with more than a few positions waiting is heavy: many sessions at once, or a long prompt. So are the clients
of one address group that are many and each ask for little: peer ids cost nothing. While somebody light is at work,
what is heavy pauses three times as long as it ran, so that it has a quarter of the time; a light client's steps then
take 1.3 times as long in the mean, however much the others want.

To strangers a listed client is never heavy: it stands for people of the owner's. Among listed ones the same holds as
among strangers: one that is heavy pauses while another, light one is at work. Where heavy strangers wait as well,
these and the listed have the turns of what is heavy by halves.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from corolla.server.counts import add

if TYPE_CHECKING:
    from corolla.server.scheduler import Schedulable

LIGHT_TOKENS: Final = 4
"""Positions × rows waiting of one client that are not much: a session or a few that decode."""
LIGHT_GROUP_TOKENS: Final = 32
"""The same of all light clients of one address group."""
ACTIVE_S: Final = 0.5
"""A light client that asked for something so lately will soon ask again."""
PRESENT_S: Final = 10.0
"""Somebody who asked for something so lately shares the server: passes are kept short."""
PAUSE: Final = 3.0
MAX_REMEMBERED: Final = 1024

Item = TypeVar("Item", bound="Schedulable")


class Fairness:
    """What waits of whom, and who was here lately."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, int] = {}
        """Positions × rows, by client."""
        self._light_in_group: dict[Hashable, int] = {}
        """Of those the ones of light clients, by address group."""
        self._seen_at: dict[Hashable, float] = {}
        self._light_at: dict[Hashable, float] = {}
        self._listed: set[Hashable] = set()
        """Clients that have been here: no more than the owner's list has."""
        self._turns: dict[Hashable, float] = {}
        """When each heavy client last had one, counted."""
        self._kind_turns = {True: 0.0, False: 0.0}
        """The same of all listed ones, and of all strangers."""
        self._num_turns = 0.0
        self._heavy_from = float("-inf")

    def came(self, item: "Schedulable", now: float) -> None:
        guest = item.guest_key
        self._count(item, item.num_tokens)
        _note(self._seen_at, guest, now)
        if not self.is_heavy(item):
            self._note_light(item, now)

    def came_alone(self, item: "Schedulable", now: float) -> None:
        """A light one for which nothing else waited, and which has left the line already."""
        _note(self._seen_at, item.guest_key, now)
        self._note_light(item, now)

    def left(self, item: "Schedulable") -> None:
        self._count(item, -item.num_tokens)

    def _count(self, item: "Schedulable", num_tokens: int) -> None:
        guest, group = item.guest_key, item.group_key
        before = self._waiting.get(guest, 0)
        after = before + num_tokens
        add(self._waiting, guest, num_tokens)
        if light := _if_light(after) - _if_light(before):
            add(self._light_in_group, group, light)

    def is_shared(self, now: float) -> bool:
        """Whether more than one client is here."""
        return len(self._seen_at) > 1 and sum(now - at <= PRESENT_S for at in self._seen_at.values()) > 1

    def is_heavy(self, item: "Schedulable") -> bool:
        """To strangers."""
        if item.is_listed:
            return False
        if self._waiting.get(item.guest_key, 0) > LIGHT_TOKENS:
            return True
        return self._light_in_group.get(item.group_key, 0) > LIGHT_GROUP_TOKENS

    def heavy_among(self, listed: Sequence["Schedulable"], now: float) -> set[Hashable]:
        """The clients behind these steps of listed ones that hold a light one of them up; none while all are heavy."""
        heavy = {item.guest_key for item in listed if self._waiting.get(item.guest_key, 0) > LIGHT_TOKENS}
        return heavy if heavy and any(self._is_light_now(guest, now) for guest in self._listed) else set()

    def may_run_heavy(self, now: float) -> bool:
        return now >= self._heavy_from or not self._is_light_active(now)

    def pause_s(self, now: float) -> float:
        """Until `may_run_heavy`, or a look whether the light ones are still active."""
        return max(0.0, min(self._heavy_from - now, ACTIVE_S))

    def ran_heavy(self, seconds: float, now: float) -> None:
        self._heavy_from = now + PAUSE * seconds

    def whose_turn(self, heavy: Sequence[Item]) -> Item:
        """The oldest step of the client who waits longest for a turn; a listed one's and a stranger's in turn."""
        item = min(heavy, key=lambda item: (self._kind_turns[item.is_listed], self._turns.get(item.guest_key, 0)))
        self._num_turns += 1
        self._kind_turns[item.is_listed] = self._num_turns
        _note(self._turns, item.guest_key, self._num_turns)
        return item

    def _note_light(self, item: "Schedulable", now: float) -> None:
        _note(self._light_at, item.guest_key, now)
        if item.is_listed:
            self._listed.add(item.guest_key)

    def _is_light_active(self, now: float) -> bool:
        lately = (guest for guest, at in self._light_at.items() if now - at <= ACTIVE_S)
        return any(self._waiting.get(guest, 0) <= LIGHT_TOKENS for guest in lately)

    def _is_light_now(self, guest: Hashable, now: float) -> bool:
        is_active = now - self._light_at.get(guest, float("-inf")) <= ACTIVE_S
        return is_active and self._waiting.get(guest, 0) <= LIGHT_TOKENS


def _if_light(num_tokens: int) -> int:
    return num_tokens if num_tokens <= LIGHT_TOKENS else 0


def _note(known: "dict[Hashable, float]", guest: Hashable, value: float) -> None:
    """The latest last; strangers must not grow the table."""
    known.pop(guest, None)
    known[guest] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
