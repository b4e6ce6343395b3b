"""A server that is told to leave while it still downloads does not wait for the rest."""

import asyncio
import time
from typing import Any

import pytest

from corolla.errors import SwarmError
from corolla.models.transfer import Progress, Transfer
from corolla.net.libp2p.config import NetworkConfig
from corolla.server import server
from corolla.server.config import ServerConfig
from corolla.server.server import run_server


def test_a_download_ends_when_its_server_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    loop = asyncio.new_event_loop()
    began = asyncio.Event()

    def download_for_ever(*_model: object, progress: Progress, **_options: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        try:
            while True:
                progress(Transfer("model", 1, 100, 1.0))
                time.sleep(0.01)
        except SwarmError as end:
            ended.append(str(end))
            raise

    async def leave_in_mid_download() -> None:
        serving = asyncio.ensure_future(
            run_server(ServerConfig(model="owner/name"), NetworkConfig(), [], stop=asyncio.Event(), on_ready=print)
        )
        async with asyncio.timeout(60):
            await began.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await loop.shutdown_default_executor()  # as at the end of the program: it waits for the thread

    monkeypatch.setattr(server, "open_model_source", download_for_ever)
    try:
        loop.run_until_complete(leave_in_mid_download())
    finally:
        loop.close()
    assert ended == ["left before the download was done; what has come stays"]
