"""A server is known while it serves, and no longer than that."""

import asyncio
import random

from corolla.ids import Fingerprint
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.server.announcer import Announcer
from corolla.swarm.announcement import Announcement
from corolla.swarm.watch import Watcher

MODEL = Fingerprint("0123456789abcdef" * 2)
SAID = Announcement(
    state="online", start=0, end=4, num_blocks=4, fingerprint=MODEL, model_name="model", dtype="float32"
)


def test_an_announcement_is_renewed_while_the_server_lives_and_gone_at_once_when_it_leaves() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("boot") as boot, network.transport("server") as server:
            await server.join(boot.addresses, timeout_s=5)
            announcer, watcher = Announcer(server, lambda: SAID, period_s=45, lifetime_s=180), Watcher(boot, MODEL)
            keeper = asyncio.create_task(announcer.keep_announced())
            await asyncio.sleep(600)
            assert list((await watcher.refresh()).servers) == [server.peer]
            keeper.cancel()
            await announcer.withdraw()
            assert not (await watcher.refresh()).servers

    run_virtual(scenario())
