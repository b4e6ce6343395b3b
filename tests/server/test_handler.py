"""Client's hop and server's handler over the in-memory network: the protocol as both sides speak it."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from msgspec.structs import replace

from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.hop import Hop, HopLimits, ServerLink
from corolla.errors import CacheFull, HopFailed, LinkDown, Overloaded, SessionLost, SwarmError, Unsupported
from corolla.ids import Fingerprint, PeerId, new_session_id
from corolla.net.channel import Channel
from corolla.net.liveness import Liveness
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.streams import MemoryStream
from corolla.net.memory.transport import MemoryTransport
from corolla.net.streams import ByteStream
from corolla.server import routes
from corolla.server.admission import Cap, Guest, Holdings
from corolla.server.config import SessionLimits
from corolla.server.data import DataStreams
from corolla.server.executor import InlineExecutor, Job
from corolla.server.handler import Handler
from corolla.server.kv import CachePool
from corolla.server.routes import MayDial
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

MODEL = Fingerprint("f" * 32)
BLOCKS = 4
T = TypeVar("T")
LIMITS = HopLimits(dial_timeout_s=5, open_timeout_s=20)


class Session:
    """One hop, driven by hand: a step at a time, its answer or its fault."""

    def __init__(self, link: ServerLink, ask: wire.Open) -> None:
        self.hop = Hop(link, ask.session, ask.start, ask.end, self)
        self.ask = ask
        self._answer: asyncio.Future[wire.Output] | None = None
        self.fault: SwarmError | None = None
        self.progress: list[int] = []
        """Newest step each time it said, unasked, how far it has got."""

    async def open(self) -> "Session":
        await self.hop.open(self.ask)
        await self.hop.connect()
        return self

    async def step(self, step: wire.Step) -> wire.Output:
        if self.fault is not None:
            raise self.fault
        self._answer = asyncio.get_running_loop().create_future()
        self.hop.push(step)
        async with asyncio.timeout(60):
            return await self._answer

    def close(self) -> None:
        self.hop.close()

    def on_output(self, hop: Hop, output: wire.Output) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(output)

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        self.fault = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def on_drain(self, hop: Hop, deadline_s: float) -> None: ...

    def on_progress(self, hop: Hop) -> None:
        assert hop.opened is not None
        self.progress.append(hop.opened.last_step_no)


async def open_session(link: ServerLink, ask: wire.Open) -> Session:
    return await Session(link, ask).open()


class Lab:
    """One server and one client that knows it."""

    def __init__(
        self, network: MemoryNetwork, server: MemoryTransport, client: MemoryTransport, handler: Handler
    ) -> None:
        self.network, self.server, self.client, self.handler = network, server, client, handler

    @asynccontextmanager
    async def link(self) -> AsyncIterator[ServerLink]:
        link = ServerLink(self.client, self.server.peer, LIMITS, Liveness())
        await link.connect()
        try:
            yield link
        finally:
            link.close()
            await asyncio.sleep(1)

    @asynccontextmanager
    async def other(self) -> AsyncIterator[ServerLink]:
        """A second client."""
        async with self.network.transport("other", address="10.1.2.3") as transport:
            await transport.join(self.server.addresses, timeout_s=5)
            link = ServerLink(transport, self.server.peer, LIMITS, Liveness())
            await link.connect()
            try:
                yield link
            finally:
                link.close()
                await asyncio.sleep(1)

    def ask(self, **changes: object) -> wire.Open:
        fields: dict[str, object] = {
            "session": new_session_id(), "fingerprint": MODEL, "start": 0, "end": BLOCKS, "max_tokens": 64,
            "upstream": self.client.peer, "wire_dtype": "float32",
        }  # fmt: skip
        return wire.Open(**(fields | changes))

    def assert_nothing_held(self) -> None:
        assert self.handler.sessions == {}
        assert self.handler.pool.free_pages == self.handler.pool.total_pages
        assert self.handler.bytes_in_flight == 0


async def _anyone(_peer: PeerId, _block: int) -> bool:
    return True


@asynccontextmanager
async def lab(
    limits: SessionLimits | None = None,
    cache_tokens: int = 1024,
    executor: InlineExecutor | None = None,
    may_dial: MayDial = _anyone,
) -> AsyncIterator[Lab]:
    network = MemoryNetwork(random.Random(0))
    async with network.transport("server") as server, network.transport("client") as client:
        await client.join(server.addresses, timeout_s=5)
        handler = Handler(
            server, ToySpan(0, BLOCKS), executor or InlineExecutor(), CachePool(cache_tokens),
            fingerprint=MODEL, limits=limits or SessionLimits(), liveness=Liveness(), may_dial=may_dial,
        )  # fmt: skip
        await handler.start()
        try:
            yield Lab(network, server, client, handler)
        finally:
            await handler.close()


def step(step_no: int, position: int, numbers: list[int], **fields: object) -> wire.Step:
    return wire.Step(step_no=step_no, position=position, hidden=hidden_of([numbers]), want="all", **fields)


async def run(hop: Session, one: wire.Step) -> list[int]:
    output = await hop.step(one)
    assert output.hidden is not None
    return numbers_of(output.hidden)


def test_a_session_computes_what_the_whole_model_does_and_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            got = await run(hop, step(0, 0, [5, 6, 7])) + await run(hop, step(1, 3, [8]))
            assert got == whole_model(BLOCKS, [5, 6, 7, 8])
            hop.close()
            await asyncio.sleep(1)
            here.assert_nothing_held()

    run_virtual(story())


def test_a_trimmed_session_goes_on_as_if_the_rest_had_never_been() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            await run(hop, step(0, 0, [5, 6, 7, 8]))
            assert await run(hop, step(1, 2, [9], trim_to=2)) == whole_model(BLOCKS, [5, 6, 9])[2:]

    run_virtual(story())


def test_only_the_wanted_positions_come_back() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            last = wire.Step(step_no=0, position=0, hidden=hidden_of([[1, 2, 3]]), want="last")
            assert await run(hop, last) == whole_model(BLOCKS, [1, 2, 3])[2:]
            none = wire.Step(step_no=1, position=3, hidden=hidden_of([[4]]), want="none")
            assert (await hop.step(none)).hidden is None

    run_virtual(story())


class TickingExecutor(InlineExecutor):
    """Its clock is a second later whenever somebody looks: what is timed from a look to the next takes one."""

    def __init__(self) -> None:
        super().__init__()
        self._ticks = itertools.count()

    def clock(self) -> float:  # a static method there
        return float(next(self._ticks))


def test_a_step_tells_how_long_the_one_before_took_to_get_away() -> None:
    async def story() -> None:
        async with lab(executor=TickingExecutor()) as here, here.link() as link:
            hop = await open_session(link, here.ask())
            outputs = [await hop.step(step(number, number, [number])) for number in range(3)]
            assert [timing.compute_s for output in outputs for timing in output.timings] == [1.0, 1.0, 1.0]
            assert [timing.send_s for output in outputs for timing in output.timings] == [0.0, 1.0, 1.0]

    run_virtual(story())


def test_a_step_sent_again_is_answered_without_being_computed_again() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            await run(hop, step(0, 0, [5]))
            first = await run(hop, step(1, 1, [6]))
            assert await run(hop, step(1, 1, [6])) == first
            assert here.handler.counters.steps == 2
            assert await run(hop, step(0, 0, [5])) == whole_model(BLOCKS, [5])
            assert await run(hop, step(2, 2, [7])) == whole_model(BLOCKS, [5, 6, 7])[2:]

    run_virtual(story())


def test_who_has_too_many_bytes_under_way_is_refused_the_next_step_and_may_send_it_again() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            here.handler.admission.bytes_in_flight.cap = Cap(peer=20, group=20, total=20)
            for number in range(3):  # of 8 bytes each
                hop.hop.push(step(number, number, [number]))
            await asyncio.sleep(1)
            with pytest.raises(Overloaded, match="bytes in flight of one client: 24, at most 20 here"):
                await hop.step(step(2, 2, [2]))
            hop.fault = None
            assert await run(hop, step(2, 2, [2])) == whole_model(BLOCKS, [0, 1, 2])[2:]
            hop.close()
            await asyncio.sleep(1)
            here.assert_nothing_held()

    run_virtual(story())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "0" * 32}, "0" * 32),
        ({"start": 2, "end": 2}, "2:2"),
        ({"max_tokens": 8193}, "8193"),
        ({"max_rows": 129}, "129"),
        ({"adapter": "theirs"}, "theirs"),
        ({"wire_dtype": "int64"}, "int64"),
    ],
    ids=["other weights", "no blocks", "too long", "too many rows", "adapter", "dtype"],
)
def test_what_the_server_cannot_do_is_refused_with_value_and_bound(change: dict[str, object], said: str) -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            with pytest.raises(Unsupported) as refused:
                await open_session(link, here.ask(**change))
            assert refused.value.value == said
            assert refused.value.bound
            here.assert_nothing_held()

    run_virtual(story())


def test_blocks_that_are_not_here_are_no_mistake_of_the_client_s() -> None:
    """The server may have moved: `Overloaded` has the client take another, where `Unsupported` would end its text."""

    async def story() -> None:
        async with lab() as here, here.link() as link:
            with pytest.raises(Overloaded) as refused:
                await open_session(link, here.ask(start=2, end=BLOCKS + 1))
            assert (refused.value.value, refused.value.bound) == (f"2:{BLOCKS + 1}", f"0:{BLOCKS}")
            here.assert_nothing_held()

    run_virtual(story())


def test_data_streams_are_closed_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """By where in memory they are, the same seed would be another simulation each time."""
    came: list[object] = []
    closed: list[object] = []
    accept, close = DataStreams.accept, MemoryStream.close

    def take(self: DataStreams, stream: ByteStream) -> None:
        came.append(stream)
        accept(self, stream)

    def end(self: MemoryStream) -> None:
        closed.append(self)
        close(self)

    async def story() -> None:
        monkeypatch.setattr(DataStreams, "accept", take)
        monkeypatch.setattr(MemoryStream, "close", end)
        async with lab() as here:
            for _ in range(40):
                await here.client.dial(here.server.peer, DATA_PROTOCOL, timeout_s=1)
            await asyncio.sleep(0.1)
            await here.handler.close()
        assert len(came) == 40
        assert [stream for stream in closed if stream in came] == came

    run_virtual(story())


def test_a_place_on_a_route_that_makes_no_sense_is_refused_with_value_and_bound() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            own, client = here.server.peer, here.client.peer
            for neighbour, bound in ((own, "another peer"), (client, "a server, or none")):
                with pytest.raises(Unsupported) as refused:
                    await open_session(link, here.ask(next=neighbour))
                assert (refused.value.value, refused.value.bound) == (neighbour, bound)
            here.assert_nothing_held()

    run_virtual(story())


def test_what_is_held_cannot_be_opened_again_or_for_other_blocks_and_both_are_named() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            for change, value, bound in (
                ({}, None, "an id not in use"),
                ({"route_version": 1, "end": 2, "is_fresh": False}, "0:2", f"0:{BLOCKS}"),
            ):
                ask = here.ask()
                await open_session(link, ask)
                with pytest.raises(Unsupported) as refused:
                    await open_session(link, here.ask(session=ask.session, **change))
                assert (refused.value.value, refused.value.bound) == (value or ask.session.hex(), bound)

    run_virtual(story())


@pytest.mark.parametrize("state", ["is_leaving", "is_away"])
def test_a_server_that_goes_takes_no_new_session_and_says_what_it_does_take(state: str) -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            setattr(here.handler, state, True)
            with pytest.raises(Overloaded) as refused:
                await open_session(link, here.ask())
            assert (refused.value.value, refused.value.bound) == ("a new session", "sessions it holds")

    run_virtual(story())


def test_a_full_cache_makes_a_session_wait_and_then_says_so() -> None:
    async def story() -> None:
        async with lab(cache_tokens=64) as here, here.link() as link, here.other() as other:
            first = await open_session(link, here.ask(max_tokens=64))
            mine = {"max_tokens": 16, "upstream": other.transport.peer}
            with pytest.raises(CacheFull) as full:
                await open_session(other, here.ask(**mine))
            assert (full.value.value, full.value.bound) == ("16", "0")
            waiting = asyncio.create_task(open_session(other, here.ask(**mine)))
            await asyncio.sleep(1)
            first.close()
            assert await run(await waiting, step(0, 0, [1])) == whole_model(BLOCKS, [1])

    run_virtual(story())


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_session_that_is_given_a_new_route_while_it_waits_for_cache_takes_that_one_when_it_has_it(
    is_fresh: bool,
) -> None:
    """Taken at once, it would compute without a lease, and lose what it holds when the lease comes."""

    async def story() -> None:
        async with lab(cache_tokens=64) as here, here.link() as link, here.other() as other:
            first = await open_session(link, here.ask(max_tokens=64))
            ask = here.ask(max_tokens=16, upstream=other.transport.peer)
            waiting = Session(other, ask)
            other.send(ask)
            await asyncio.sleep(1)
            opening = asyncio.create_task(waiting.hop.open(replace(ask, route_version=1, is_fresh=is_fresh)))
            await asyncio.sleep(1)
            assert not opening.done()
            assert here.handler.pool.free_pages == 0
            first.close()
            assert (await opening).route_version == 1
            await waiting.hop.connect()
            history = [1, 2, 3]
            for number, token in enumerate(history):
                answer = await run(waiting, step(number, number, [token], route_version=1))
            assert answer == whole_model(BLOCKS, history)[-1:]
            waiting.close()

    run_virtual(story())


def test_a_session_with_a_new_route_for_which_no_cache_frees_up_is_refused_on_that_route() -> None:
    async def story() -> None:
        async with (
            lab(SessionLimits(cache_wait_s=5), cache_tokens=64) as here,
            here.link() as link,
            here.other() as other,
        ):
            await open_session(link, here.ask(max_tokens=64))
            ask = here.ask(max_tokens=16, upstream=other.transport.peer)
            other.send(ask)
            await asyncio.sleep(1)
            refused: list[wire.AnyMessage] = []
            waiting = Session(other, ask)
            hear = waiting.hop.hear
            waiting.hop.hear = lambda message: (refused.append(message), hear(message))[1]
            with pytest.raises(CacheFull):
                await waiting.hop.open(replace(ask, route_version=1))
            assert [message.route_version for message in refused if isinstance(message, wire.Refused)] == [1]
            assert len(here.handler.sessions) == 1

    run_virtual(story())


def test_a_peer_that_is_not_announced_as_the_next_hop_is_not_dialled_and_may_be_once_it_is() -> None:
    announced: set[PeerId] = set()

    async def may_dial(peer: PeerId, _block: int) -> bool:
        return peer in announced

    async def story() -> None:
        async with lab(may_dial=may_dial) as here, here.network.transport("stranger") as stranger, here.link() as link:
            await stranger.join(here.server.addresses, timeout_s=5)
            dialled: list[PeerId] = []
            await stranger.serve(DATA_PROTOCOL, lambda stream: dialled.append(stream.peer))
            ask = here.ask(next=stranger.peer)
            session = await open_session(link, ask)
            await asyncio.sleep(1)
            assert isinstance(session.fault, LinkDown)
            assert "not announced" in str(session.fault)
            assert dialled == []
            announced.add(stranger.peer)
            await session.hop.open(replace(ask, route_version=1, is_fresh=False))
            await asyncio.sleep(1)
            assert dialled == [here.server.peer]
            session.close()

    run_virtual(story())


def test_one_client_cannot_take_the_whole_cache_by_many_sessions() -> None:
    async def story() -> None:
        limits = SessionLimits(max_session_tokens=64)
        async with lab(limits, cache_tokens=256) as here, here.link() as link, here.other() as other:
            for _ in range(2):
                await open_session(link, here.ask(max_tokens=64))
            with pytest.raises(Overloaded) as refused:
                await open_session(link, here.ask(max_tokens=16))
            assert (refused.value.value, refused.value.bound) == ("144", "128")
            await open_session(other, here.ask(max_tokens=64, upstream=other.transport.peer))

    run_virtual(story())


def test_more_sessions_than_allowed_are_refused_as_overload() -> None:
    async def story() -> None:
        async with lab(SessionLimits(max_sessions_per_peer=2)) as here, here.link() as link:
            for _ in range(2):
                await open_session(link, here.ask())
            with pytest.raises(Overloaded) as refused:
                await open_session(link, here.ask())
            assert (refused.value.value, refused.value.bound) == ("3", "2")

    run_virtual(story())


def test_a_session_that_is_given_route_after_route_is_held_and_costs_no_more_than_the_rate() -> None:
    async def scenario() -> None:
        async with lab() as here, here.link() as link:
            ask = here.ask()
            session = await open_session(link, ask)
            counted = here.handler.counters.refusals
            routes = here.handler.admission.limits.peer_routes
            for version in range(1, 3 * int(routes.burst)):
                link.send(here.ask(session=ask.session, route_version=version))
            await asyncio.sleep(0.5)
            [held] = here.handler.sessions.values()
            assert routes.burst <= held.state.route_version <= routes.burst + routes.per_s
            assert counted["overloaded"] >= routes.burst
            session.close()

    run_virtual(scenario())


def test_a_session_closed_and_opened_again_at_once_is_not_ended_by_the_word_on_the_first() -> None:
    async def scenario() -> None:
        async with lab() as here, here.link() as link:
            ask = here.ask()
            (await open_session(link, ask)).close()
            again = await open_session(link, here.ask(session=ask.session))
            assert (await again.step(step(0, 0, [1]))).position == 1
            assert again.fault is None
            again.close()

    run_virtual(scenario())


def test_a_killed_client_gives_its_cache_back_at_once_and_a_frozen_one_after_the_heartbeats() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            await open_session(link, here.ask())
            here.network.freeze(here.client.peer)
            await asyncio.sleep(5)
            assert here.handler.sessions
            await asyncio.sleep(3)
            here.assert_nothing_held()
            here.network.thaw(here.client.peer)

        async with lab() as here, here.link() as link:
            await open_session(link, here.ask())
            here.network.kill(here.client.peer)
            await asyncio.sleep(1)
            here.assert_nothing_held()

    run_virtual(story())


def test_a_killed_server_fails_the_step_at_once_and_a_frozen_one_after_the_heartbeats() -> None:
    async def story(fault: str) -> float:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            await run(hop, step(0, 0, [5]))
            getattr(here.network, fault)(here.server.peer)
            began = asyncio.get_running_loop().time()
            with pytest.raises(HopFailed):
                await hop.step(step(1, 1, [6]))
            took = asyncio.get_running_loop().time() - began
            here.network.thaw(here.server.peer)
            return took

    assert run_virtual(story("kill")) < 1
    assert 5 < run_virtual(story("freeze")) < 8


def test_an_idle_session_is_dropped_and_the_client_told() -> None:
    async def story() -> None:
        async with lab(SessionLimits(idle_timeout_s=30)) as here, here.link() as link:
            hop = await open_session(link, here.ask())
            await run(hop, step(0, 0, [5]))
            await asyncio.sleep(29)
            await run(hop, step(1, 1, [6]))
            await asyncio.sleep(31)
            here.assert_nothing_held()
            with pytest.raises(SessionLost, match="30 s"):
                await hop.step(step(2, 2, [7]))

    run_virtual(story())


def test_a_session_belongs_to_the_client_that_opened_it() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link, here.network.transport("thief") as thief:
            ask = here.ask()
            hop = await open_session(link, ask)
            await thief.join(here.server.addresses, timeout_s=5)
            stream = await thief.dial(here.server.peer, DATA_PROTOCOL, timeout_s=5)
            heard: list[wire.AnyMessage] = []
            channel = Channel(stream, we_dialed=True, on_message=heard.append, on_closed=lambda _error: None)
            channel.send(wire.Attach(session=ask.session))
            channel.send(step(0, 0, [66]))
            await asyncio.sleep(6)
            assert not channel.is_open
            assert heard == []
            assert await run(hop, step(0, 0, [5])) == whole_model(BLOCKS, [5])

    run_virtual(story())


@pytest.mark.parametrize("protocol", [CONTROL_PROTOCOL, DATA_PROTOCOL])
def test_nonsense_ends_its_own_stream_and_nothing_else(protocol: str) -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            ended: list[str] = []
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 10):
                stream = await here.client.dial(here.server.peer, protocol, timeout_s=5)
                stream.start(lambda _data: None, ended.append)
                stream.write([garbage])
            await asyncio.sleep(1)
            assert len(ended) == 2
            assert await run(hop, step(0, 0, [5])) == whole_model(BLOCKS, [5])

    run_virtual(story())


def test_a_data_stream_that_says_nothing_is_closed() -> None:
    async def story() -> None:
        async with lab(SessionLimits(attach_timeout_s=3)) as here:
            stream = await here.client.dial(here.server.peer, DATA_PROTOCOL, timeout_s=5)
            ended: list[str] = []
            stream.start(lambda _data: None, ended.append)
            await asyncio.sleep(2)
            assert not ended
            await asyncio.sleep(2)
            assert ended

    run_virtual(story())


def test_a_server_that_leaves_waits_in_peace_for_a_session_that_ended_in_line() -> None:
    async def story() -> None:
        async with lab(cache_tokens=64) as here, here.link() as link, here.handler.pool.reserve(64, 1, timeout_s=1):
            waiting = asyncio.create_task(open_session(link, here.ask()))
            await asyncio.sleep(1)
            waiting.cancel()
            (session,) = here.handler.sessions.values()
            session.end("its client closed it", by_client=True)
            await here.handler.drain(60)
            assert here.handler.sessions == {}

    run_virtual(story())


def test_what_another_server_sends_is_no_sign_of_the_clients_life() -> None:
    async def story() -> None:
        async with lab() as here, here.link() as link, here.other() as other:
            ask = here.ask(upstream=other.transport.peer, route_version=1)
            await open_session(link, ask)
            stream = await other.transport.dial(here.server.peer, DATA_PROTOCOL, timeout_s=5)
            channel = Channel(stream, we_dialed=True, on_message=lambda _: None, on_closed=lambda _: None)
            channel.send(wire.Attach(session=ask.session, route_version=1))
            here.network.freeze(here.client.peer)
            for number in range(10):
                channel.send(step(number, 0, [1], route_version=0))  # of an older route: it may never end
                await asyncio.sleep(1)
            here.assert_nothing_held()
            channel.close()
            here.network.thaw(here.client.peer)

    run_virtual(story())


def test_reading_the_numbers_from_another_thread_changes_no_books(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, numbers, give_back = set[int](), list[int](), Holdings.give_back

    def noted(books: Holdings, guest: Guest, amount: int) -> None:
        threads.add(threading.get_ident())
        give_back(books, guest, amount)

    monkeypatch.setattr(Holdings, "give_back", noted)

    async def story() -> None:
        async with lab() as here, here.link() as link:
            hop = await open_session(link, here.ask())
            await run(hop, step(0, 0, [5, 6, 7]))
            reader = threading.Thread(target=lambda: numbers.append(here.handler.bytes_in_flight))
            reader.start()
            reader.join()
            await run(hop, step(1, 3, [8]))
            assert numbers == [0]
            assert threads == {threading.get_ident()}

    run_virtual(story())


class DoneAtOnce(InlineExecutor):
    """A device thread that is done with a step before the loop, which hands it over, has come to its next line."""

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.run()

    async def call(self, work: Callable[[], T], *, after: Hashable = None) -> T:
        await asyncio.sleep(1)
        return await super().call(work, after=after)


def test_who_stands_by_says_how_far_it_has_got_also_when_what_lay_unread_is_done_at_once() -> None:
    """Else a drain would wait for it until its deadline."""

    async def story() -> None:
        async with lab(executor=DoneAtOnce()) as here, here.link() as link:
            session = Session(link, here.ask(standby=True, hold=True))
            hop, opening = session.hop, asyncio.create_task(session.hop.open(session.ask))
            await asyncio.sleep(1.5)  # it has cache, and is not on its route yet
            await hop.connect()
            hop.push(step(7, 0, [1, 2, 3], replay=True))
            await opening
            await asyncio.sleep(1)
            assert session.progress == [7]
            hop.close()
            await asyncio.sleep(3)
            here.assert_nothing_held()

    run_virtual(story())


@pytest.mark.parametrize("is_aside", [False, True])
def test_however_many_replays_are_asked_for_one_is_sent_at_a_time_and_the_newest_last(
    monkeypatch: pytest.MonkeyPatch, *, is_aside: bool
) -> None:
    """Each holds a copy of the session's journal for as long as the other side takes nothing."""
    under_way, most, begun = 0, 0, list[int]()

    async def slowly(_channel: Channel, steps: Sequence[wire.Step], _version: int, **_rest: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        begun.append(len(steps))
        await asyncio.sleep(5)
        under_way -= 1

    monkeypatch.setattr(routes, "send_paced", slowly)

    async def story() -> None:
        async with lab() as here, here.link() as link, here.network.transport("next") as following:
            await following.join(here.server.addresses, timeout_s=5)
            await following.serve(DATA_PROTOCOL, lambda stream: stream.start(lambda _: None, lambda _: None))
            hop = await open_session(link, here.ask(next=following.peer))
            await asyncio.sleep(1)
            hop.hop.push(step(0, 0, [5, 6, 7]))
            await asyncio.sleep(1)
            ask = wire.Replay(session=hop.ask.session, from_position=0, to=following.peer if is_aside else None)
            for number in range(60):
                hop.hop.replay(ask)
                await asyncio.sleep(0.5 * (number % 20 == 0))
            await asyncio.sleep(30)
            assert most == 1
            assert begun == [1, 1]
            hop.close()
            await asyncio.sleep(1)
            here.assert_nothing_held()

    run_virtual(story())
