"""A client that knows only the protocol's page, and a server of ours: what the page says of it is what it does."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.ids import Fingerprint, PeerId, SessionId
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport
from corolla.server.config import SessionLimits
from corolla.server.executor import InlineExecutor
from corolla.server.handler import Handler
from corolla.server.kv import CachePool
from corolla.server.push import Push
from corolla.wire import messages as wire

SESSION, BLOCKS = SessionId(b"s" * 16), 4
M = TypeVar("M", bound=wire.AnyMessage)


class Client:
    """Two streams to one server, and all that came on them."""

    def __init__(self, transport: MemoryTransport, server: MemoryTransport) -> None:
        self._transport, self._server = transport, server
        self.heard: list[wire.AnyMessage] = []

    async def begin(self) -> None:
        self.control = await self._dial("/corolla/control/1")
        self.open()
        self.data = await self._dial("/corolla/data/1")
        self.data.send(wire.Attach(session=SESSION))

    async def _dial(self, protocol: str) -> Channel:
        stream = await self._transport.dial(self._server.peer, protocol, timeout_s=5)
        return Channel(stream, we_dialed=True, on_message=self.heard.append, on_closed=lambda _error: None)

    def open(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "session": SESSION, "fingerprint": Fingerprint("f" * 32), "start": 0, "end": BLOCKS, "max_tokens": 64,
            "upstream": self._transport.peer, "wire_dtype": "float32",
        }  # fmt: skip
        self.control.send(wire.Open(**(fields | changes)))

    def step(self, step_no: int, position: int, numbers: list[int], **fields: Any) -> None:
        self.data.send(wire.Step(step_no=step_no, position=position, hidden=hidden_of([numbers]), **fields))

    async def next(self, kind: type[M]) -> M:
        """The oldest message of this kind that nobody has asked for."""
        await asyncio.sleep(1)
        found = next(message for message in self.heard if isinstance(message, kind))
        self.heard.remove(found)
        return found


def with_server(story: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport("server") as server, network.transport("client") as client:
            await client.join(server.addresses, timeout_s=5)
            handler = Handler(
                server, ToySpan(0, BLOCKS), InlineExecutor(), CachePool(1024), fingerprint=Fingerprint("f" * 32),
                limits=SessionLimits(), liveness=Liveness(),
            )  # fmt: skip
            await handler.start()
            try:
                one = Client(client, server)
                await one.begin()
                await one.next(wire.Opened)
                await story(one)
            finally:
                await handler.close()

    run_virtual(main())


def test_of_an_open_said_again_only_the_route_counts() -> None:
    async def story(client: Client) -> None:
        client.step(0, 0, [5, 6])
        assert numbers_of((await client.next(wire.Output)).hidden) == whole_model(BLOCKS, [5, 6])[-1:]
        client.open(
            route_version=1, is_fresh=False, fingerprint=Fingerprint("0" * 32), max_tokens=2, max_rows=1, want="none",
            wire_dtype="int64",
        )  # fmt: skip
        opened = await client.next(wire.Opened)
        assert (opened.route_version, opened.cached_tokens, opened.last_step_no) == (1, 2, 0)
        assert opened.journal_from == 2, "a tail's own is what it holds"
        client.step(1, 2, [7], route_version=1)
        assert numbers_of((await client.next(wire.Output)).hidden) == whole_model(BLOCKS, [5, 6, 7])[-1:]
        client.open(route_version=2, is_fresh=False, end=BLOCKS - 1)
        assert (await client.next(wire.Refused)).code == "unsupported"
        client.open(route_version=1, is_fresh=False)
        assert (await client.next(wire.Refused)).code == "unsupported"

    with_server(story)


def test_a_replayed_step_is_answered_as_one_where_it_wants_something() -> None:
    async def story(client: Client) -> None:
        client.step(3, 0, [5, 6], replay=True, want="none")
        client.step(4, 2, [7], replay=True)
        output = await client.next(wire.Output)
        assert (output.step_no, output.position, output.replay) == (4, 3, True)
        client.step(7, 2, [7], replay=True)
        refused = await client.next(wire.Refused)
        assert (refused.step_no, refused.code) == (7, "out_of_order")
        assert not [message for message in client.heard if isinstance(message, wire.Output)]

    with_server(story)


def test_a_replay_to_a_server_without_a_next_gives_its_answers_again() -> None:
    async def story(client: Client) -> None:
        client.step(0, 0, [5])
        client.step(1, 1, [6])
        first = [await client.next(wire.Output) for _ in range(2)]
        client.control.send(wire.Replay(session=SESSION, from_step=1))
        again = await client.next(wire.Output)
        assert (again.step_no, again.replay, again.hidden) == (1, False, first[1].hidden)
        client.control.send(wire.Replay(session=SESSION, route_version=1, from_step=0))
        await asyncio.sleep(1)
        assert not [message for message in client.heard if isinstance(message, wire.Output)], "of another route"

    with_server(story)


def test_a_server_that_has_become_a_tail_tells_its_client_no_history() -> None:
    async def story(client: Client) -> None:
        client.open(route_version=1, next=PeerId("nobody"), is_fresh=False)
        client.step(0, 0, [5], route_version=1)
        await asyncio.sleep(1)
        client.open(route_version=2, is_fresh=False)
        await asyncio.sleep(1)
        client.control.send(wire.Replay(session=SESSION, route_version=2, from_position=0))
        await asyncio.sleep(1)
        client.step(1, 1, [6], route_version=2)
        await asyncio.sleep(1)
        assert not [message for message in client.heard if isinstance(message, wire.Step)]
        outputs = [message for message in client.heard if isinstance(message, wire.Output)]
        assert [numbers_of(output.hidden)[-1] for output in outputs] == whole_model(BLOCKS, [5, 6])

    with_server(story)


def test_a_replay_from_a_position_sends_the_newest_steps_live_unless_a_number_says_otherwise() -> None:
    push = Push()
    push.is_tail = False
    for number in range(21):
        push.onward(wire.Step(step_no=number, position=number, hidden=hidden_of([[number]])))

    def sent(from_position: int, live_from: int) -> list[tuple[int, int, bool]]:
        """(position, how many, replay) of each step."""
        steps = push.copy(from_position, 4096, 1 << 20, live_from, in_chunks=True)
        return [(step.position, step.hidden.shape[1], step.replay) for step in steps]

    history, newest = (0, 13, True), range(13, 21)
    assert sent(0, 0) == [history, *((number, 1, False) for number in newest)]
    assert sent(0, 1 << 60) == [history, *((number, 1, True) for number in newest)]
    assert sent(0, 20) == [history, *((number, 1, number < 20) for number in newest)]
    assert sent(19, 1 << 60) == [(19, 1, True), (20, 1, True)]
