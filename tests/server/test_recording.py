"""A server that serves records its tapes by itself, where steps are computed."""

import asyncio
import threading
from typing import cast

import pytest

from corolla.models import recording
from corolla.models.span import Span
from corolla.server import executor, server
from corolla.server.executor import DeviceThread
from corolla.server.hosting import Host


class Noting:
    """A host that notes which thread lets which span use tapes."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, str]] = []

    def use_tapes(self, span: Span) -> None:
        self.asked.append((span, threading.current_thread().name))


def test_tapes_are_recorded_on_the_device_thread_once_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "QUIET_S", 0.05)
    monkeypatch.setattr(recording, "symbols", lambda: None)

    async def story() -> None:
        device, host, span = DeviceThread(), Noting(), cast("Span", object())
        await asyncio.wait_for(server._use_tapes(cast("Host", host), device, span), 60)
        assert host.asked == [(span, "corolla-device")]
        await device.close()

    asyncio.run(story())
