"""Whom a client may have a server dial: who is announced, and finding that out costs one reading a second at most."""

import asyncio
from types import SimpleNamespace
from typing import cast

from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.server.neighbours import MIN_REFRESH_S, Neighbours
from corolla.swarm.watch import Watcher


class Announcements:
    """A watcher whose readings are counted; what was announced since the last one is seen by the next."""

    def __init__(self) -> None:
        self.spans: dict[PeerId, tuple[int, int]] = {}
        self.view = SimpleNamespace(servers={})
        self.readings = 0

    async def refresh(self) -> None:
        await asyncio.sleep(0.1)
        self.readings += 1
        servers = {peer: SimpleNamespace(start=start, end=end) for peer, (start, end) in self.spans.items()}
        self.view = SimpleNamespace(servers=servers)


def neighbours() -> tuple[Announcements, Neighbours]:
    announcements = Announcements()
    return announcements, Neighbours(cast("Watcher", announcements))


def test_who_has_just_been_announced_is_found_and_then_known_without_another_reading() -> None:
    async def story() -> None:
        announcements, known = neighbours()
        announcements.spans[PeerId("new")] = (4, 8)
        assert await known.may_dial(PeerId("new"), 4)
        assert await known.may_dial(PeerId("new"), 7)
        assert announcements.readings == 1
        assert not await known.may_dial(PeerId("new"), 8)

    run_virtual(story())


def test_naming_strangers_costs_one_reading_a_second_and_keeps_nobody_who_is_known_waiting() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        announcements, known = neighbours()
        announcements.spans[PeerId("friend")] = (0, 4)
        assert await known.may_dial(PeerId("friend"), 0)
        began = loop.time()
        strangers = [asyncio.ensure_future(known.may_dial(PeerId(f"stranger {n}"), 0)) for n in range(50)]
        await asyncio.sleep(0.05)
        assert await known.may_dial(PeerId("friend"), 0)
        assert loop.time() - began < 0.1
        assert not any(await asyncio.gather(*strangers))
        for number in range(10):
            assert not await known.may_dial(PeerId(f"other {number}"), 0)
        assert announcements.readings <= 2 + (loop.time() - began) / MIN_REFRESH_S

    run_virtual(story())
