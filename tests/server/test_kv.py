"""The cache pool: pages taken are pages returned, the line is first come first served, and waiting ends."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.errors import CacheFull
from corolla.net.memory.loop import run_virtual
from corolla.server.kv import PAGE_TOKENS, CachePool, pages_for


def test_pages_are_whole_for_each_row() -> None:
    assert pages_for(1, 1) == 1
    assert pages_for(PAGE_TOKENS + 1, 3) == 6


def test_a_session_that_does_not_fit_waits_until_another_ends() -> None:
    async def story() -> list[str]:
        pool, told = CachePool(4 * PAGE_TOKENS), []

        async def hold(name: str, pages: int, seconds: float) -> None:
            async with pool.reserve(pages * PAGE_TOKENS, 1, timeout_s=60):
                told.append(f"{name} in")
                await asyncio.sleep(seconds)
            told.append(f"{name} out")

        async with asyncio.TaskGroup() as group:
            for name, pages, seconds in (("a", 3, 5), ("b", 2, 1), ("c", 1, 1)):
                group.create_task(hold(name, pages, seconds))
                await asyncio.sleep(0)
        assert pool.free_pages == pool.total_pages
        return told

    # c would fit beside a, but b came first: nobody is overtaken for ever
    assert run_virtual(story()) == ["a in", "a out", "b in", "c in", "b out", "c out"]


def test_waiting_ends_with_the_numbers_and_lets_the_next_one_through() -> None:
    async def story() -> None:
        pool = CachePool(4 * PAGE_TOKENS)
        async with pool.reserve(3 * PAGE_TOKENS, 1, timeout_s=1):
            with pytest.raises(CacheFull) as full:
                async with pool.reserve(2 * PAGE_TOKENS, 1, timeout_s=2):
                    pass
            assert (full.value.value, full.value.bound) == (str(2 * PAGE_TOKENS), str(PAGE_TOKENS))
            async with pool.reserve(PAGE_TOKENS, 1, timeout_s=2):
                pass
        assert pool.free_pages == 4

    run_virtual(story())


def test_what_can_never_fit_is_refused_at_once() -> None:
    async def story() -> float:
        pool = CachePool(4 * PAGE_TOKENS)
        async with pool.reserve(PAGE_TOKENS, 1, timeout_s=1):
            with pytest.raises(CacheFull, match="in all") as full:
                async with pool.reserve(5 * PAGE_TOKENS, 1, timeout_s=100):
                    pass
        assert (full.value.value, full.value.bound) == (str(5 * PAGE_TOKENS), str(4 * PAGE_TOKENS))
        return asyncio.get_running_loop().time()

    assert run_virtual(story()) < 1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_whatever_happens_pages_taken_are_pages_returned(seed: int) -> None:
    """Random sessions with random lengths, time-outs and cancellations."""
    rng = random.Random(seed)

    async def session(pool: CachePool) -> None:
        await asyncio.sleep(rng.uniform(0, 3))
        try:
            async with pool.reserve(rng.randint(1, 90), rng.randint(1, 2), timeout_s=rng.choice([0.5, 1, 5])):
                assert pool.free_pages >= 0
                await asyncio.sleep(rng.uniform(0, 2))
        except CacheFull:
            pass

    async def story() -> None:
        pool = CachePool(8 * PAGE_TOKENS)
        tasks = [asyncio.create_task(session(pool)) for _ in range(20)]
        for task in rng.sample(tasks, 6):
            asyncio.get_running_loop().call_later(rng.choice([0.5, 1.0, 1.5, 2.0]), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.free_pages == pool.total_pages

    run_virtual(story())
