"""Random lives of a swarm in memory: whatever dies, freezes, leaves, moves or is cut off, the numbers are the same.

Each seed is one life (`apps/sim/chaos.py`): random routes, random troubles, every output compared, and after it no
session, lease, journal, task or stream may be left. A seed that fails names the command that replays it.
"""

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from corolla.apps.sim import writing
from corolla.apps.sim.chaos import Kind, live

FAST_SEEDS = range(40)
ALL_SEEDS = range(10_000)
"""What `make test` lives through."""
PLAIN = Kind(latency_s=0.0, num_writers=1)
KINDS = ("can_trim", "prefill_in_chunks", "expires", "is_tight")
"""What some lives have otherwise than plain ones."""
LIVES_AT_A_TIME = 100
"""One task of a worker process: long enough to be worth sending, short enough to share the work evenly."""
TOLD_FAILURES = 5
SAME = (7, 11, 12, 13)


@dataclass(slots=True)
class Lived:
    """What some seeds amounted to; plain values, since it comes from another process."""

    lives: int = 0
    steps: int = 0
    recoveries: int = 0
    troubles: int = 0
    repeats: int = 0
    cancelled: int = 0
    moves: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Lived") -> None:
        self.lives += other.lives
        self.steps += other.steps
        self.recoveries += other.recoveries
        self.troubles += other.troubles
        self.repeats += other.repeats
        self.cancelled += other.cancelled
        self.moves += other.moves
        self.kinds += other.kinds
        self.failures += other.failures


class ErrorLogged(AssertionError):
    """A task failed and only said so in the log: nobody waited for it."""


@contextmanager
def no_error_logged() -> Iterator[None]:
    """Errors in the log are failures: a handler's task that breaks must not pass unseen because a retry mends it."""
    told: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: told.append(logging.Formatter().format(record))
    logging.getLogger("corolla").addHandler(listener)
    try:
        yield
    finally:
        logging.getLogger("corolla").removeHandler(listener)
    if told:
        raise ErrorLogged("\n".join(told))


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Nobody looks for cycles of garbage on the way: `collect_garbage` does after each life."""
    collect_garbage()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_garbage() -> None:
    """What is left (caches) is not looked at again, so that the next time sees only one life's."""
    gc.collect()
    gc.freeze()


def live_all(seeds: range) -> Lived:
    """Lives these seeds one after another. A failed one ends itself, not the others."""
    lived = Lived()
    with garbage_kept():
        for seed in seeds:
            lived.add(live_once(seed))
            collect_garbage()
    return lived


def live_once(seed: int) -> Lived:
    try:
        with no_error_logged():
            life = live(seed)
    except Exception as failure:  # noqa: BLE001 - whatever ends a life is told, and the others go on
        told = f"python -m corolla.apps.sim.chaos {seed} gave:\n" + "".join(traceback.format_exception(failure))
        return Lived(failures=[told])
    moves = sum(" moves from " in event for event in life.events)
    kinds = Counter(kind for kind in KINDS if getattr(life.kind, kind) != getattr(PLAIN, kind))
    return Lived(1, life.steps, life.recoveries, len(life.events), life.repeats, life.cancelled, moves, kinds)


def assert_all_went_well(lived: Lived, seeds: range) -> None:
    told = "\n".join(lived.failures[:TOLD_FAILURES])
    assert not lived.failures, f"{len(lived.failures)} of {len(seeds)} lives went wrong; the first:\n{told}"
    assert lived.lives == len(seeds)
    # Lives in which nothing happens would pass without saying anything.
    assert lived.steps > 5 * lived.lives
    assert lived.troubles > 5 * lived.lives
    assert lived.recoveries > lived.lives
    assert lived.repeats > lived.lives
    assert lived.cancelled > lived.lives / 4
    assert lived.moves > lived.lives / 2
    assert all(lived.kinds[kind] > lived.lives / 50 for kind in KINDS), lived.kinds


def test_whatever_befalls_a_swarm_the_text_is_the_same_and_nothing_is_left() -> None:
    assert_all_went_well(live_all(FAST_SEEDS), FAST_SEEDS)


@pytest.mark.full
@pytest.mark.timeout(2700)
def test_the_text_is_the_same_in_ten_thousand_lives() -> None:
    starts = range(ALL_SEEDS.start, ALL_SEEDS.stop, LIVES_AT_A_TIME)
    total = Lived()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=fresh) as pool:
        for lived in pool.map(live_all, [range(start, start + LIVES_AT_A_TIME) for start in starts]):
            total.add(lived)
    assert_all_went_well(total, ALL_SEEDS)


def test_the_same_seed_is_the_same_life_in_another_process_too() -> None:
    """Or the command that a failure names would replay another one. Sets have another order there: of names, and of
    tasks and streams, by where in memory they are."""
    code = "from corolla.apps.sim.chaos import live; print([live(seed) for seed in SEEDS])".replace("SEEDS", str(SAME))
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert told.stdout.strip() == repr([live(seed) for seed in SAME])


def test_lives_need_no_torch() -> None:
    code = "import sys, corolla.apps.sim.chaos; print({'torch', 'transformers'} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"


def test_a_life_that_goes_wrong_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = writing.whole_model
    monkeypatch.setattr(writing, "whole_model", lambda blocks, row: [number ^ 1 for number in right(blocks, row)])
    lived = live_all(range(11, 12))
    assert "WrongText" in lived.failures[0]
    assert "replay: python -m corolla.apps.sim.chaos 11" in lived.failures[0]
