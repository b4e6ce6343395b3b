"""Servers that give NaN, wrong shapes, wrong numbers or false witness: the text goes on without them, and is the same.

Only the liar is ever banned, by the client's own evidence; honest servers say whose fault it is, and are believed as
far as that harms nobody but themselves.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from corolla.apps.sim import chaos
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import HIDDEN_SIZE, ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.session import Session
from corolla.clock import loop_time
from corolla.errors import BadInput, BadUpstream, Faulty, HopFailed
from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.server.control import Control
from corolla.server.handler import Handler
from corolla.server.hosted import DataLink, HostedSession
from corolla.server.push import Push
from corolla.server.runner import SessionCache
from corolla.wire import messages as wire
from corolla.wire.messages import Output, Step, Want
from corolla.wire.tensors import DType, WireTensor

NUM_BLOCKS = 6
PLACES = {"head": "0:2", "middle": "2:4", "tail": "4:6"}
PROMPT = [3, 1, 4, 1, 5]
NEXT = [9, 2, 6, 5, 3, 5]
HONEST_UNTIL = 7
"""Positions before the first lie."""

Lie = Callable[[Step | Output], Step | Output]


def nan_like(hidden: WireTensor) -> WireTensor:
    """One number of many."""
    data = bytearray(hidden.data)
    struct.pack_into("<f", data, len(data) - 4, float("nan"))
    return WireTensor(hidden.dtype, hidden.shape, bytes(data))


def say_nan(message: Step | Output) -> Step | Output:
    return message if message.hidden is None else replace(message, hidden=nan_like(message.hidden))


def say_twice_as_wide(message: Step | Output) -> Step | Output:
    if message.hidden is None:
        return message
    rows, tokens, size = message.hidden.shape
    wide = WireTensor("float32", (rows, tokens, 2 * size), bytes(message.hidden.data) * 2)
    return replace(message, hidden=wide)


def say_one_token_more(message: Step | Output) -> Step | Output:
    if message.hidden is None:
        return message
    rows, tokens, size = message.hidden.shape
    longer = WireTensor("float32", (rows, tokens + 1, size), bytes(message.hidden.data) + bytes(4 * size * rows))
    return replace(message, hidden=longer)


def say_another_position(message: Step | Output) -> Step | Output:
    return replace(message, position=message.position + 1)


def say_a_later_number(message: Step | Output) -> Step | Output:
    return replace(message, step_no=message.step_no + 100)


def say_an_earlier_number(message: Step | Output) -> Step | Output:
    return replace(message, step_no=max(message.step_no - 1, 0))


def say_a_flat_replay(message: Step | Output) -> Step | Output:
    """One that nobody asked for, of one dimension."""
    if message.hidden is None:
        return message
    rows, tokens, size = message.hidden.shape
    return replace(message, replay=True, hidden=WireTensor("float32", (rows * tokens * size,), message.hidden.data))


def say_as_many_hops_as_travel(message: Step | Output) -> Step | Output:
    return replace(message, timings=[wire.HopTiming(0.0, 0.0, 0.0)] * wire.MAX_HOPS)


LIES = [
    say_nan, say_twice_as_wide, say_one_token_more, say_another_position, say_a_later_number, say_an_earlier_number,
    say_a_flat_replay, say_as_many_hops_as_travel,
]  # fmt: skip
every_lie = pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
every_place = pytest.mark.parametrize("place", list(PLACES))


class LyingPush(Push):
    """Sends something else than was computed, from some position on: live, again, and in replays."""

    def __init__(self, lie: Lie) -> None:
        super().__init__()
        self._lie = lie

    def _transmit(self, message: Step | Output) -> None:
        super()._transmit(self._lie(message) if message.position >= HONEST_UNTIL else message)

    def copy(
        self, from_position: int, max_tokens: int, max_bytes: int, live_from: int, *, in_chunks: bool
    ) -> list[Step]:
        steps: list[Step] = []
        for step in super().copy(from_position, max_tokens, max_bytes, live_from, in_chunks=in_chunks):
            told = self._lie(step) if step.position >= HONEST_UNTIL else step
            assert isinstance(told, Step)
            steps.append(told)
        return steps


class NanSpan(ToySpan):
    """Its blocks give NaN from some position on: broken memory, say."""

    def __init__(self, start: int, end: int, last_of_them: int = 1 << 20) -> None:
        super().__init__(start, end)
        self._positions = range(HONEST_UNTIL, last_of_them + 1)

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        hidden = super().run(cache, step, want, wire_dtype)
        return nan_like(hidden) if hidden is not None and step.position in self._positions else hidden


def make_liar(handler: Handler, lie: Lie) -> None:
    """Whatever sessions are opened there are lied to."""
    honest = handler.open_session

    def open_session(control: Control, ask: wire.Open) -> None:
        honest(control, ask)
        for session in handler.sessions.values():
            if not isinstance(session.push, LyingPush):
                session.push = LyingPush(lie)

    handler.open_session = open_session


def make_accuser(handler: Handler) -> None:
    """Calls good steps bad."""
    steps, replies = handler._steps, handler._replies
    honest = steps.take

    def take(session: HostedSession, link: DataLink, step: Step) -> None:
        if step.position >= HONEST_UNTIL:
            replies.refuse_step(session, step, BadUpstream("it is not finite, I say", value=link.peer))
        else:
            honest(session, link, step)

    steps.take = take


class Witness:
    """What the client's router was told of servers and links."""

    def __init__(self, session: Session) -> None:
        self.banned: set[PeerId] = set()
        self.bad_links: set[tuple[PeerId, PeerId]] = set()
        router = session._router
        saw_fault, saw_link_fault = router.saw_fault, router.saw_link_fault

        def fault(peer: PeerId) -> None:
            self.banned.add(peer)
            saw_fault(peer)

        def link_fault(before: PeerId, after: PeerId) -> None:
            self.bad_links.add((before, after))
            saw_link_fault(before, after)

        router.saw_fault, router.saw_link_fault = fault, link_fault


async def serve_all(swarm: MemorySwarm, place: str, span: ToySpan | None = None) -> dict[str, Handler]:
    """One server of each place, `span` at the one that will not be honest."""
    return {name: await swarm.serve(name, PLACES[name], runner=span if name == place else None) for name in PLACES}


async def write(session: Session) -> list[int]:
    """A prompt, single tokens, and two at once."""
    answer: list[int] = []
    for numbers in (PROMPT, *([number] for number in NEXT[:-2]), NEXT[-2:]):
        output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
        assert output is not None
        answer += numbers_of(output)
    return answer


async def serve_substitutes(swarm: MemorySwarm, places: Sequence[str]) -> None:
    for name in places:
        await swarm.serve(f"other {name}", PLACES[name])


def story(
    place: str, corrupt: Callable[[Handler], None], *, span: ToySpan | None = None, others: Sequence[str] = ()
) -> tuple[Witness, dict[str, PeerId], Session, float]:
    """One text over a liar at this place; an honest server of the same blocks joins once the route is taken."""

    async def told() -> tuple[Witness, dict[str, PeerId], Session, float]:
        async with MemorySwarm(num_blocks=NUM_BLOCKS) as swarm:
            handlers = await serve_all(swarm, place, span)
            corrupt(handlers[place])
            client = await swarm.client("client", ClientConfig())
            session = await client.start_session(swarm.model, max_tokens=64, max_rows=1)
            witness, began = Witness(session), loop_time()
            try:
                await serve_substitutes(swarm, [place, *others])
                assert await write(session) == whole_model(NUM_BLOCKS, PROMPT + NEXT)
                took_s = loop_time() - began
                peers = {name: handler.transport.peer for name, handler in swarm.handlers.items()}
            finally:
                session.close()
            await asyncio.sleep(1)
            for handler in swarm.handlers.values():
                assert not handler.sessions
                assert handler.pool.free_pages == handler.pool.total_pages
            return witness, peers, session, took_s

    return run_virtual(told())


@every_place
@every_lie
def test_the_text_goes_on_without_the_liar_and_nobody_else_is_banned(lie: Lie, place: str) -> None:
    witness, peers, session, _ = story(place, lambda handler: make_liar(handler, lie))
    assert witness.banned == {peers[place]}
    assert peers[place] not in {hop.peer_id for hop in session.route}


@every_place
@every_lie
def test_nor_where_every_place_has_another_who_could_be_blamed(lie: Lie, place: str) -> None:
    others = [other for other in PLACES if other != place]
    witness, peers, _, _ = story(place, lambda handler: make_liar(handler, lie), others=others)
    assert witness.banned == {peers[place]}


@every_place
def test_a_server_whose_blocks_give_nan_says_so_and_is_left_at_once(place: str) -> None:
    start, end = map(int, PLACES[place].split(":"))
    witness, peers, _, took_s = story(place, lambda _handler: None, span=NanSpan(start, end))
    assert witness.banned == {peers[place]}
    assert witness.bad_links == set()
    assert took_s < 2


@pytest.mark.parametrize(("place", "before"), [("middle", "head"), ("tail", "middle")])
def test_a_false_witness_costs_the_link_something_and_itself_a_ban(place: str, before: str) -> None:
    witness, peers, session, _ = story(place, make_accuser)
    assert witness.banned == {peers[place]}
    assert witness.bad_links == {(peers[before], peers[place])}
    assert peers[before] in {hop.peer_id for hop in session.route}


def test_a_head_that_calls_the_clients_own_step_bad_is_banned() -> None:
    witness, peers, _, _ = story("head", make_accuser)
    assert witness.banned == {peers["head"]}


def test_the_link_to_a_liars_successor_is_used_again_once_the_liar_is_gone() -> None:
    _, _, session, _ = story("middle", lambda handler: make_liar(handler, say_nan))
    assert list(session._ring.heads) == [0]


def test_nan_everywhere_is_the_models_own_and_told_to_the_user() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            for name in "abcde":
                await swarm.serve(name, "0:2", runner=NanSpan(0, 2))
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                began = loop_time()
                with pytest.raises(Faulty, match="NaN"):
                    await write(session)
                assert loop_time() - began < 5

    run_virtual(told())


def test_one_lying_server_alone_is_asked_again_and_then_the_user_told() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            make_liar(await swarm.serve("a", "0:2"), say_nan)
            client = await swarm.client("client", ClientConfig(wait_for_servers_s=30))
            async with client.open_session(swarm.model, max_tokens=64) as session:
                began = loop_time()
                with pytest.raises(HopFailed, match="NaN"):
                    await write(session)
                assert 20 < loop_time() - began < 120

    run_virtual(told())


def test_our_own_nan_is_never_sent() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            handler = await swarm.serve("a", "0:2")
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                with pytest.raises(BadInput, match="NaN"):
                    await session.step(nan_like(hidden_of([[1, 2]])), num_tokens=2, want="all")
                assert handler.counters.steps == 0
                assert await write(session) == whole_model(2, PROMPT + NEXT)

    run_virtual(told())


@pytest.mark.full
def test_lies_among_everything_else_that_befalls_a_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills, freezes, cuts, drains and joins, and one in eight of those that join is a liar."""
    honest, liars = chaos.Fate._serve, list[str]()

    async def serve(fate: chaos.Fate, span: str) -> None:
        number, name = fate._number, f"s{fate._number}"
        await honest(fate, span)
        if number >= 4 and fate._rng.random() < 0.12:
            liars.append(name)
            make_liar(fate._swarm.handlers[name], fate._rng.choice(LIES))

    monkeypatch.setattr(chaos.Fate, "_serve", serve)
    steps = sum(chaos.live(seed).steps for seed in range(30_500, 30_540))
    assert steps > 300
    assert len(liars) > 10


def test_nothing_that_the_toy_gives_looks_like_nan() -> None:
    """Or the tests above would find liars where there are none."""
    assert HIDDEN_SIZE == 2
    assert numbers_of(hidden_of([[(1 << 64) - 1]])) == [0xBFFFFFFF_BFFFFFFF]
