"""The device thread runs what it is given, in scheduler order, and survives what fails."""

import asyncio
import math
import threading
from dataclasses import dataclass, field
from typing import cast

import pytest

from corolla.clock import loop_time
from corolla.net.memory.loop import run_virtual
from corolla.server import executor
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


def test_what_takes_long_waits_for_a_pause_between_steps() -> None:
    async def story() -> tuple[float, float]:
        return await waited_s(Steps(quiet_from_s=5.0)), await waited_s(Steps(quiet_from_s=math.inf))

    after_steps, after_ever_more_steps = run_virtual(story())
    assert 5.0 + executor.QUIET_S <= after_steps <= 5.0 + executor.QUIET_S + executor.LOOK_S
    assert after_ever_more_steps == pytest.approx(executor.LONGEST_WAIT_S, abs=executor.LOOK_S)


def test_the_thread_knows_for_how_long_it_has_had_no_step() -> None:
    async def story() -> None:
        thread, ran, gate = DeviceThread(), [], threading.Event()
        running = Note(ran, 0, gate=gate)
        thread.submit([running])
        await asyncio.to_thread(running.started.wait, 10)
        assert thread.quiet_s == 0
        gate.set()
        await thread.call(lambda: None)
        await asyncio.sleep(0.05)
        assert 0.05 <= thread.quiet_s < 100
        await thread.close()

    asyncio.run(story())


@dataclass
class Steps:
    """A device that has steps until a time of the loop."""

    quiet_from_s: float

    def __post_init__(self) -> None:
        self.began = loop_time()

    @property
    def quiet_s(self) -> float:
        return max(0.0, loop_time() - self.began - self.quiet_from_s)


async def waited_s(device: Steps) -> float:
    began = loop_time()
    await executor.until_quiet(cast("DeviceThread", device))
    return loop_time() - began


def test_a_device_that_hangs_keeps_nobody_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CLOSE_S", 0.2)
    goes_on = threading.Event()

    async def scenario() -> None:
        device = DeviceThread()
        hanging = asyncio.ensure_future(device.call(goes_on.wait))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            await device.close()
        goes_on.set()
        await hanging

    asyncio.run(scenario())
