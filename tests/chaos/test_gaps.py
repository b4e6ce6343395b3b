"""Servers whose journals are far too short for the text: what they cannot replay comes from further back."""

import pytest

from corolla.apps.sim.chaos import live
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.push import Push

SHORT_BYTES = 40
"""A few positions of the toy."""


@pytest.fixture
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own is as long as ever."""
    monkeypatch.setattr(Push.__init__, "__defaults__", (SHORT_BYTES,))


@pytest.mark.usefixtures("short_journals")
@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_the_first_recovery_already_goes_back_as_far_as_it_must(lost: str) -> None:
    """To the client, since no server's journal is whole: with one loss, one recovery, and no vain try before."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.01)) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                for number in range(30):
                    if number == 25:
                        await swarm.serve("another", {"a": "0:2", "b": "2:4", "c": "4:6"}[lost])
                        swarm.network.kill(swarm.network.transport(lost).peer)
                    output = await session.step(hidden_of([[number]]), num_tokens=1, want="last")
                    assert output is not None
                    assert numbers_of(output) == whole_model(6, range(number + 1))[-1:]
                assert session.recoveries == 1

    run_virtual(told())


@pytest.mark.usefixtures("short_journals")
def test_random_lives_go_well_with_short_journals() -> None:
    lives = [live(seed) for seed in range(40_000, 40_016)]
    assert sum(life.recoveries for life in lives) > len(lives)
