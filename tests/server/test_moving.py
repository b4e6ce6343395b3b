"""A server that the swarm needs elsewhere goes there, and whoever it serves keeps the text: bit by bit the same."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.session import Session
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.tensors import to_torch, to_wire
from corolla.models.testing import write_tiny
from corolla.net.memory.loop import run_virtual
from corolla.server.executor import InlineExecutor
from corolla.server.handler import Handler
from corolla.server.moving import RETRY_S, Order, Placement
from corolla.server.placing import PlacingConfig
from corolla.server.runner import SpanRunner
from corolla.server.span import TorchSpanRunner
from corolla.swarm.announcement import Announcement

LOAD_S = 20.0
SOON = PlacingConfig(mean_check_s=10.0, settling_check_s=5.0)


@dataclass
class ToyLoader:
    """Loads toys, slowly; remembers which, and in what state of the server."""

    kind: Order
    faults: list[Exception] = field(default_factory=list[Exception])
    loaded: list[range] = field(default_factory=list[range])

    async def load(self, span: range) -> tuple[SpanRunner, tuple[float, float]]:
        await asyncio.sleep(LOAD_S)
        if self.faults:
            raise self.faults.pop(0)
        self.loaded.append(span)
        return ToySpan(span.start, span.stop), (1000.0, 1000.0)

    def order(self, num_blocks: int) -> Order:
        return self.kind


async def feed(session: Session, numbers: list[int]) -> list[int]:
    output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
    assert output is not None
    return numbers_of(output)


def crowd(loader: ToyLoader, tell: Callable[[MemorySwarm], Awaitable[None]]) -> None:
    """Three servers on the front of a model and one on its back; of the three, the first may move."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            placement = Placement(loader, config=SOON, rng=random.Random(1))
            await swarm.serve("mover", "0:4", placement=placement)
            await swarm.serve("back", "4:8")
            await tell(swarm)

    run_virtual(told())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not is_so():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.5)


async def announced(client: Swarm, swarm: MemorySwarm, handler: Handler) -> Announcement:
    view = await client.router(swarm.model).refresh()
    return view.servers[handler.transport.peer].announcement


def facts(swarm: MemorySwarm) -> tuple[int, int]:
    span = swarm.handlers["mover"].runner.facts
    return span.start, span.end


@pytest.mark.parametrize("kind", ["load_first", "leave_first"])
def test_a_session_goes_on_while_its_server_moves(kind: Order) -> None:
    loader = ToyLoader(kind)

    async def story(swarm: MemorySwarm) -> None:
        client = await swarm.client("client")
        mover = swarm.handlers["mover"]
        async with client.open_session(swarm.model, max_tokens=400) as session:
            assert session.route[0].peer_id == mover.transport.peer
            for name in ("second", "third"):
                await swarm.serve(name, "0:4")
            said = [random.Random(2).randrange(100) for _ in range(300)]
            got: list[int] = []
            for number in said:
                got += await feed(session, [number])
                await asyncio.sleep(0.5)
            assert got == whole_model(8, said)
            assert facts(swarm) == (4, 8)
            assert loader.loaded == [range(4, 8)]
            assert session.route[0].peer_id != mover.transport.peer
            assert session.recoveries == 1
            assert not mover.sessions
            assert mover.pool.free_pages == mover.pool.total_pages
        view = await client.router(swarm.model).refresh()
        assert (view.servers[mover.transport.peer].start, view.servers[mover.transport.peer].is_online) == (4, True)
        async with client.open_session(swarm.model, max_tokens=8) as session:
            assert await feed(session, [3, 1]) == whole_model(8, [3, 1])

    crowd(loader, story)


def test_a_server_that_has_moved_takes_the_session_again_when_nobody_else_can() -> None:
    async def story(swarm: MemorySwarm) -> None:
        client = await swarm.client("client")
        mover = swarm.handlers["mover"]
        async with client.open_session(swarm.model, max_tokens=400) as session:
            for name in ("second", "third"):
                await swarm.serve(name, "0:4")
            got = await feed(session, [1])
            await until(lambda: facts(swarm) == (4, 8) and not mover.sessions)
            got += await feed(session, [2])
            swarm.network.kill(swarm.handlers["back"].transport.peer)
            got += await feed(session, [3])
            assert [hop.peer_id for hop in session.route][1] == mover.transport.peer
            assert got == whole_model(8, [1, 2, 3])

    crowd(ToyLoader("load_first"), story)


def test_the_old_blocks_are_served_until_the_new_ones_are_there_if_memory_allows() -> None:
    async def story(swarm: MemorySwarm) -> None:
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=400) as session:
            for name in ("second", "third"):
                await swarm.serve(name, "0:4")
            while facts(swarm) == (0, 4):
                assert session.recoveries == 0
                await feed(session, [1])
                await asyncio.sleep(0.5)
            await asyncio.sleep(5)
            assert session.recoveries == 1

    crowd(ToyLoader("load_first"), story)


def test_new_sessions_too_come_to_the_old_blocks_until_the_new_ones_are_there() -> None:
    """A download may take an hour, in which the server has all that they need."""
    loader = ToyLoader("load_first")

    async def story(swarm: MemorySwarm) -> None:
        client, mover = await swarm.client("client"), swarm.handlers["mover"]
        for name in ("second", "third"):
            await swarm.serve(name, "0:4")
        async with asyncio.timeout(600):
            while (await announced(client, swarm, mover)).moving_to is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.5)
        await asyncio.sleep(5)  # no claim any more, but under way
        said = await announced(client, swarm, mover)
        assert (said.state, said.start, said.end, said.moving_to) == ("online", 0, 4, (4, 8))
        for name in ("second", "third"):
            swarm.network.kill(swarm.handlers[name].transport.peer)
        async with client.open_session(swarm.model, max_tokens=8) as session:
            assert session.route[0].peer_id == mover.transport.peer
            assert await feed(session, [3, 1]) == whole_model(8, [3, 1])

    crowd(loader, story)


def test_a_server_whose_owner_named_its_blocks_stays() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            for name in "abc":
                await swarm.serve(name, "0:4")
            await swarm.serve("back", "4:8")
            await asyncio.sleep(3600)
            spans = {name: (h.runner.facts.start, h.runner.facts.end) for name, h in swarm.handlers.items()}
            assert spans == {"a": (0, 4), "b": (0, 4), "c": (0, 4), "back": (4, 8)}

    run_virtual(told())


@pytest.mark.parametrize(("kind", "num_faults"), [("load_first", 1), ("leave_first", 2)])
def test_where_the_new_blocks_cannot_be_had_the_server_is_back_at_the_old_ones(kind: Order, num_faults: int) -> None:
    """Leaving first, even the old ones fail to load once."""
    loader = ToyLoader(kind, faults=[BadInput("the disk is full") for _ in range(num_faults)])

    async def story(swarm: MemorySwarm) -> None:
        for name in ("second", "third"):
            await swarm.serve(name, "0:4")
        client = await swarm.client("client")
        began = loop_time()
        await until(lambda: not loader.faults)
        loader.faults = [BadInput("still full")] * 1000 if kind == "load_first" else []
        await asyncio.sleep(RETRY_S + LOAD_S + 5)
        assert loop_time() - began < 600
        assert facts(swarm) == (0, 4) if kind == "load_first" else loader.loaded[0] == range(4)
        mover = swarm.handlers["mover"]
        assert not mover.is_away
        view = await client.router(swarm.model).refresh()
        assert view.health != "broken"

    crowd(loader, story)


def test_a_server_that_hosts_nothing_for_a_while_takes_no_session() -> None:
    async def story(swarm: MemorySwarm) -> None:
        for name in ("second", "third"):
            await swarm.serve(name, "0:4")
        client = await swarm.client("client")
        mover = swarm.handlers["mover"]
        await until(lambda: mover.is_away)
        for _ in range(20):
            async with client.open_session(swarm.model, max_tokens=8) as session:
                assert session.route[0].peer_id != mover.transport.peer
        assert not mover.counters.refusals
        said = await announced(client, swarm, mover)
        assert (said.state, said.start, said.end) == ("joining", 4, 8)

    crowd(ToyLoader("leave_first"), story)


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_client_that_has_not_heard_of_a_move_takes_others_for_the_old_blocks(*, leaves_first: bool) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            for name, span in (("a", "0:4"), ("b", "0:4"), ("back", "4:8")):
                await swarm.serve(name, span)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=8) as session:
                first = session.route[0].peer_id
            moved = next(name for name in "ab" if swarm.handlers[name].transport.peer == first)
            await swarm.move(moved, ToySpan(4, 8), timeout_s=60, leaves_first=leaves_first)
            async with client.open_session(swarm.model, max_tokens=8) as session:
                assert await feed(session, [1, 2]) == whole_model(8, [1, 2])
                assert session.route[0].peer_id != first
            assert swarm.handlers[moved].counters.refusals == {"overloaded": 1}, "it was asked, by what it said before"

    run_virtual(told())


def test_real_blocks_move_too(tmp_path: Path) -> None:
    """Every position after the move is what the whole model gives, up to the rounding of another batch shape."""
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny", "llama"))

    class Spans(ToyLoader):
        async def load(self, span: range) -> tuple[SpanRunner, tuple[float, float]]:
            self.loaded.append(span)
            return TorchSpanRunner(load_span(checkpoint, span.start, span.stop)), (1000.0, 1000.0)

    loader = Spans("load_first")

    async def told() -> None:
        async with MemorySwarm(num_blocks=6) as swarm:
            front, _ = await loader.load(range(3))
            placement = Placement(loader, config=SOON, rng=random.Random(1))
            mover = await swarm.serve("mover", "0:3", runner=front, placement=placement)
            back, _ = await loader.load(range(3, 6))
            await swarm.serve("back", "3:6", runner=back)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=150) as session:
                assert session.route[0].peer_id == mover.transport.peer
                for name in ("second", "third"):
                    another, _ = await loader.load(range(3))
                    await swarm.serve(name, "0:3", runner=another)
                whole = load_span(checkpoint, 0, 6)
                cache, chance = whole.new_cache(1), torch.Generator().manual_seed(0)
                for _ in range(120):
                    hidden = torch.randn(1, 1, whole.hidden_size, generator=chance)
                    output = await session.step(to_wire(hidden), num_tokens=1, want="all")
                    assert output is not None
                    assert torch.allclose(to_torch(output), whole.forward(hidden, cache), rtol=1e-5, atol=1e-5)
                    await asyncio.sleep(0.5)
                assert loader.loaded[-1] == range(3, 6)
                assert (session.recoveries, mover.runner.facts.start) == (1, 3)

    run_virtual(told())


def test_real_work_moves_the_announced_speed() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            executor = InlineExecutor()
            moments = iter(range(1_000_000))
            executor.clock = lambda: 0.01 * next(moments)  # pyright: ignore[reportAttributeAccessIssue]
            await swarm.serve("busy", "0:8", executor=executor)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=200) as session:
                for _ in range(100):
                    await feed(session, [1])
            await asyncio.sleep(15)
            [server] = (await client.router(swarm.model).refresh()).servers.values()
            assert server.announcement.decode_tokens_per_s == pytest.approx(100, rel=0.2)
            assert server.announcement.prefill_tokens_per_s == 1000.0

    run_virtual(told())
