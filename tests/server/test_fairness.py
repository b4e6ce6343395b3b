"""A client that floods takes little from others, all when nobody is there, and nobody starves. A device in numbers."""

import heapq
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from corolla.server.scheduler import Scheduler

STEP_S = 0.006


@dataclass(frozen=True, slots=True)
class Work:
    """One session that asks again and again: a step of so many tokens, which takes so long, then a pause."""

    session_key: str
    guest_key: str
    num_tokens: int = 1
    seconds: float = STEP_S
    pause_s: float = 0.001
    group_key: str = "net"
    is_listed: bool = False

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens > 1


def served(works: Sequence[Work], until_s: float = 60.0) -> dict[str, list[float]]:
    """How long the steps of each client took, from asking to the end, on one device."""
    scheduler: Scheduler[Work] = Scheduler()
    coming = [(0.001 * number, number, work) for number, work in enumerate(works)]
    heapq.heapify(coming)
    numbers, now = itertools.count(len(works)), 0.0
    asked_at: dict[str, float] = {}
    took: dict[str, list[float]] = {work.guest_key: [] for work in works}

    def arrive() -> None:
        while coming and coming[0][0] <= now:
            at, _, work = heapq.heappop(coming)
            asked_at[work.session_key] = at
            scheduler.add(work, now)

    while now < until_s:
        arrive()
        batch = scheduler.take(now)
        for work in batch:
            now += work.seconds
            scheduler.ran(work, work.seconds, now)
            took[work.guest_key].append(now - asked_at[work.session_key])
            heapq.heappush(coming, (now + work.pause_s, next(numbers), work))
        if not batch:
            wake_s = [at - now for at, _, _ in coming[:1]] + ([scheduler.pause_s(now)] if scheduler else [])
            now += max(min(wake_s), 1e-6)
    return took


VICTIM = Work("victim", "victim")
FLOODS = {
    "sixty sessions": [Work(f"flood {n}", "flood", pause_s=0.0) for n in range(60)],
    "long prompts": [Work(f"flood {n}", "flood", num_tokens=2048, seconds=1.0, pause_s=0.0) for n in range(8)],
    "one endless prompt": [Work("flood", "flood", num_tokens=2048, seconds=1.0, pause_s=0.0)],
    "many rows": [Work("flood", "flood", num_tokens=128, seconds=0.2, pause_s=0.0)],
    "a hundred names from one network": [
        Work(f"flood {n}", f"flood {n}", pause_s=0.0, group_key="theirs") for n in range(100)
    ],
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_leaves_another_clients_steps_within_one_and_a_half_times(flood: list[Work]) -> None:
    alone = statistics.mean(served([VICTIM])["victim"])
    beside = statistics.mean(served([VICTIM, *flood])["victim"])
    assert beside < 1.5 * alone


@pytest.mark.parametrize("pause_s", [0.05, 1.0])
def test_so_it_does_for_a_client_who_is_far_away(pause_s: float) -> None:
    far = Work("far", "far", pause_s=pause_s)
    alone = pause_s + statistics.mean(served([far])["far"])
    beside = pause_s + statistics.mean(served([far, *FLOODS["sixty sessions"]])["far"])
    assert beside < 1.5 * alone


@pytest.mark.full
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_nobody_starves_and_who_is_alone_has_everything(flood: list[Work]) -> None:
    def busy_s(took: dict[str, list[float]]) -> float:
        return sum(len(took[guest]) * work.seconds for guest, work in {work.guest_key: work for work in flood}.items())

    assert busy_s(served(flood)) > 0.95 * 60
    assert busy_s(served([VICTIM, *flood])) > 0.15 * 60


def test_a_listed_client_is_never_heavy_to_strangers() -> None:
    gateway = [Work(f"user {n}", "gateway", is_listed=True) for n in range(20)]
    stranger = Work("stranger", "stranger")
    took = served([*gateway, stranger])
    assert len(took["gateway"]) > 15 * len(took["stranger"]) > 0


def listed(works: Sequence[Work]) -> list[Work]:
    return [replace(work, is_listed=True) for work in works]


@pytest.mark.parametrize("flood", ["sixty sessions", "long prompts", "many rows"])
def test_a_listed_clients_flood_leaves_another_listed_ones_steps_within_one_and_a_half_times(flood: str) -> None:
    alone = statistics.mean(served([VICTIM])["victim"])
    took = served(listed([VICTIM, *FLOODS[flood]]), until_s=20.0)
    assert statistics.mean(took["victim"]) < 1.5 * alone
    seconds = FLOODS[flood][0].seconds
    assert seconds * len(took["flood"]) > 0.15 * 20


def test_beside_a_light_listed_client_a_heavy_one_has_half_of_what_is_left_to_strangers_who_flood() -> None:
    friend, gateway = listed([VICTIM]), listed([Work(f"user {n}", "gateway", pause_s=0.0) for n in range(20)])
    strangers = [Work(f"{n} {m}", f"stranger {n}", pause_s=0.0) for n in range(10) for m in range(10)]
    took = served([*friend, *gateway, *strangers], until_s=20.0)
    of_strangers = sum(len(steps) for guest, steps in took.items() if guest.startswith("stranger"))
    assert len(took["gateway"]) == pytest.approx(of_strangers, rel=0.1)
    assert len(took["gateway"]) > 0.1 * 20 / STEP_S


def test_listed_clients_who_are_all_heavy_run_all_their_sessions() -> None:
    gateways = listed([Work(f"{guest} {n}", guest) for guest in ("a", "b") for n in range(20)])
    took = served([*gateways, Work("stranger", "stranger")], until_s=20.0)
    assert len(took["a"]) == pytest.approx(len(took["b"]), rel=0.02)
    assert len(took["a"]) > 15 * len(took["stranger"]) > 0


def test_two_light_clients_share_alike() -> None:
    took = served([VICTIM, Work("other", "other")])
    assert len(took["victim"]) == pytest.approx(len(took["other"]), rel=0.02)


def test_two_heavy_clients_share_alike() -> None:
    took = served([Work(f"{guest} {n}", guest, pause_s=0.0) for guest in ("a", "b") for n in range(20)])
    assert len(took["a"]) == pytest.approx(len(took["b"]), rel=0.05)
