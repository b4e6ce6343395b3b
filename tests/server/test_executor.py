"""The device thread runs what it is given, in scheduler order, and survives what fails."""

import asyncio
import threading
from dataclasses import dataclass, field

import pytest

from corolla.server.executor import DeviceThread


@dataclass
class Note:
    ran: list[int]
    number: int
    is_prefill: bool = False
    session_key: str = "one"
    guest_key: str = "client"
    group_key: str = "net"
    is_listed: bool = False
    num_tokens: int = 1
    gate: threading.Event | None = None
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        self.ran.append(self.number)


def test_what_waits_while_one_runs_is_taken_together_decodes_first() -> None:
    async def story() -> list[int]:
        thread, ran, gate = DeviceThread(), [], threading.Event()
        first = Note(ran, 0, gate=gate)
        thread.submit([first])
        await asyncio.to_thread(first.started.wait, 10)
        thread.submit([Note(ran, 1, is_prefill=True), Note(ran, 2, is_prefill=True)])
        thread.submit([Note(ran, 3, session_key="other")])
        assert thread.waiting == 4
        gate.set()
        await thread.close()
        assert thread.waiting == 0
        return ran

    assert asyncio.run(story()) == [0, 3, 1, 2]


def test_a_call_runs_on_the_thread_and_brings_back_its_result_or_error() -> None:
    async def story() -> None:
        thread = DeviceThread()
        assert await thread.call(lambda: threading.current_thread().name) == "corolla-device"
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        assert await thread.call(lambda: 7) == 7
        await thread.close()

    asyncio.run(story())
