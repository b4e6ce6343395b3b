"""Sessions over several servers of an in-memory swarm: the chain computes what one machine would."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.router import ServedModel
from corolla.client.session import Session, StepInput
from corolla.clock import loop_time
from corolla.errors import BadInput, CacheFull, MissingBlocks, Overloaded, Unsupported
from corolla.ids import Fingerprint
from corolla.net.identity import ephemeral
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.net.records import sign_record
from corolla.server.config import SessionLimits
from corolla.swarm.announcement import announcement_key

LATENCY_S = 0.02


def swarm_story(
    num_blocks: int = 8, *, latency_s: float = 0.001
) -> Callable[[Callable[[MemorySwarm], Awaitable[None]]], None]:
    def run(story: Callable[[MemorySwarm], Awaitable[None]]) -> None:
        async def told() -> None:
            async with MemorySwarm(num_blocks=num_blocks, conditions=LinkConditions(latency_s)) as swarm:
                await story(swarm)

        run_virtual(told())

    return run


async def feed(session: Session, numbers: list[int]) -> list[int]:
    output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
    assert output is not None
    return numbers_of(output)


@pytest.mark.parametrize("cuts", [["0:8"], ["0:4", "4:8"], ["0:2", "2:4", "4:6", "6:8"]])
def test_any_chain_computes_what_the_whole_model_does(cuts: list[str]) -> None:
    async def story(swarm: MemorySwarm) -> None:
        for number, cut in enumerate(cuts):
            await swarm.serve(f"server {number}", cut)
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=32) as session:
            assert [f"{hop.start}:{hop.end}" for hop in session.route] == cuts
            got = await feed(session, [3, 1, 4]) + await feed(session, [1]) + await feed(session, [5])
            assert got == whole_model(8, [3, 1, 4, 1, 5])
            assert session.position == 5
            assert len(session.timings) == len(cuts)
        await asyncio.sleep(1)
        assert all(not handler.sessions for handler in swarm.handlers.values())

    swarm_story()(story)


def test_overlapping_spans_are_used_as_the_route_says() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("front", "0:5")
        await swarm.serve("back", "3:8")
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=8) as session:
            assert [(hop.start, hop.end) for hop in session.route] == [(0, 5), (5, 8)]
            assert await feed(session, [7, 8]) == whole_model(8, [7, 8])

    swarm_story()(story)


def test_a_crowd_that_announces_another_depth_hides_no_server_from_those_who_have_the_model() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("front", "0:4")
        mallory, client = await swarm.join("mallory"), await swarm.client("client")
        front = (await client.router(swarm.model).refresh()).servers[swarm.handlers["front"].transport.peer]
        for _ in range(100):
            liar = ephemeral()
            key = announcement_key(swarm.model.fingerprint, liar.peer)
            value = msgspec.structs.replace(front.announcement, start=0, end=9, num_blocks=9).encode()
            assert mallory.records.keep(key, liar.peer, sign_record(liar, key, value, mallory.wall_time() + 180))
        await swarm.serve("back", "4:8")
        async with client.open_session(swarm.model, max_tokens=8) as session:
            assert await feed(session, [7, 8]) == whole_model(8, [7, 8])
            await asyncio.sleep(10)  # the front looks up whether the back is announced, beside the work
        assert swarm.handlers["front"].counters.links_down == 0

    swarm_story()(story)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_trims_and_row_gathers_in_any_order_equal_a_history_written_by_hand(data: st.DataObject) -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("a", "0:3")
        await swarm.serve("b", "3:8")
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=64, max_rows=3) as session:
            rows = [[data.draw(st.integers(0, 9))] for _ in range(data.draw(st.integers(1, 3)))]
            output = await session.step(hidden_of(rows), num_tokens=1, want="all")
            for _ in range(data.draw(st.integers(1, 5))):
                if data.draw(st.booleans()):
                    keep = data.draw(st.integers(1, len(rows[0])))
                    session.trim(keep)
                    rows = [row[:keep] for row in rows]
                if data.draw(st.booleans()):
                    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
                    session.gather(order)
                    rows = [list(rows[index]) for index in order]
                new = [data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2)) for _ in rows]
                rows = [row + more for row, more in zip(rows, new, strict=True)]
                output = await session.step(hidden_of(new), num_tokens=2, want="all")
                expected = [number for row in rows for number in whole_model(8, row)[-2:]]
                assert output is not None
                assert numbers_of(output) == expected
            assert session.position == len(rows[0])

    swarm_story()(story)


def test_missing_blocks_are_named_before_anything_is_sent() -> None:
    async def story(swarm: MemorySwarm) -> None:
        handler = await swarm.serve("a", "0:4")
        client = await swarm.client("client")
        with pytest.raises(MissingBlocks) as missing:
            await client.start_session(swarm.model, max_tokens=8)
        assert missing.value.blocks == [4, 5, 6, 7]
        assert handler.counters.sessions_opened == 0

    swarm_story()(story)


def test_a_served_model_of_the_same_name_with_other_weights_is_refused_with_both_fingerprints() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("a", "0:8")
        client = await swarm.client("client")
        mine = ServedModel("toy", Fingerprint("a" * 32), 8)
        with pytest.raises(Unsupported) as refused:
            await client.start_session(mine, max_tokens=8)
        assert mine.fingerprint in str(refused.value)
        assert swarm.model.fingerprint in str(refused.value)

    swarm_story()(story)


def test_a_model_that_nobody_serves_is_named_beside_a_few_that_are_with_their_fingerprints() -> None:
    async def story(swarm: MemorySwarm) -> None:
        served = [ServedModel(f"other-{n}", Fingerprint(f"{n}" * 32), 8 if n == 5 else 4) for n in range(1, 6)]
        for model in served:
            await swarm.serve(model.name, f"0:{model.num_blocks}", model=model)
        client = await swarm.client("client")
        mine = ServedModel("mine", Fingerprint("a" * 32), 8)
        with pytest.raises(MissingBlocks) as missing:
            await client.start_session(mine, max_tokens=8)
        said = str(missing.value)
        assert missing.value.blocks == list(range(8))
        assert f"your mine with the fingerprint {mine.fingerprint}" in said
        assert f"serves other-5 ({served[4].fingerprint}), other-1 ({served[0].fingerprint}), other-2" in said
        assert said.endswith("and 2 more")

    swarm_story()(story)


def test_a_session_longer_than_servers_announce_is_refused_with_the_two_numbers_and_reaches_none() -> None:
    async def story(swarm: MemorySwarm) -> None:
        limits = SessionLimits(max_session_tokens=64)
        handlers = [
            await swarm.serve("a", "0:4", limits=limits),
            await swarm.serve("b", "4:8"),
            await swarm.serve("c", "4:8", limits=SessionLimits(max_session_tokens=32)),
        ]
        client = await swarm.client("client")

        def prompt(_: Session | None = None) -> list[StepInput]:
            return [StepInput(hidden_of([[3, 1, 4]]), 3)]

        async with client.open_session(swarm.model, max_tokens=64, max_rows=2) as session:  # known links from now on
            assert await feed(session, [1]) == whole_model(8, [1])
        await asyncio.sleep(1)
        for one in (client, await swarm.client("newcomer")):
            await one.router(swarm.model).find_route(tokens_needed=1)
            await asyncio.sleep(5)  # round trips are measured beside it
            before = [(h.counters.refusals.copy(), h.counters.sessions_opened, h.num_control_streams) for h in handlers]
            session = one.new_session(swarm.model, max_tokens=65)
            with pytest.raises(Unsupported) as refused:
                await session.begin(prompt, want="last")
            assert (refused.value.value, refused.value.bound) == ("65", "64")
            assert "65" in str(refused.value)
            assert "64" in str(refused.value)
            await asyncio.sleep(1)
            after = [(h.counters.refusals.copy(), h.counters.sessions_opened, h.num_control_streams) for h in handlers]
            assert after == before

    swarm_story()(story)


def test_a_longer_session_goes_to_the_servers_that_take_it_however_far_or_banned() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("short", "0:8", limits=SessionLimits(max_session_tokens=64))
        long = (await swarm.serve("long", "0:8", cache_tokens=16)).transport.peer  # no room now: the dearer by far
        client = await swarm.client("client")
        router = client.router(swarm.model)
        cost = client.config.cost.for_session(prompt_tokens=1, max_tokens=100)
        router.saw_fault(long)
        route = await router.find_route(tokens_needed=100, cost=cost)
        assert [hop.peer for hop in route.hops] == [long]
        assert router.find_part(range(4), tokens_needed=100, cost=cost).hops[0].peer == long
        with pytest.raises(MissingBlocks):
            router.find_part(range(4), tokens_needed=100, without=frozenset([long]), cost=cost)

    swarm_story()(story)


def test_a_full_server_is_left_out_for_one_with_room() -> None:
    async def story(swarm: MemorySwarm) -> None:
        full = await swarm.serve("full", "0:8", cache_tokens=64, limits=SessionLimits(cache_wait_s=0.1))
        client = await swarm.client("client")
        first = await client.start_session(swarm.model, max_tokens=64)
        with pytest.raises((CacheFull, Overloaded)):
            await client.start_session(swarm.model, max_tokens=64)
        await swarm.serve("roomy", "0:8")
        await client.router(swarm.model).refresh()
        async with client.open_session(swarm.model, max_tokens=64) as session:
            assert [hop.peer_id for hop in session.route] == [swarm.handlers["roomy"].transport.peer]
            assert await feed(session, [1]) == whole_model(8, [1])
        first.close()
        await asyncio.sleep(1)
        assert full.pool.free_pages == full.pool.total_pages

    swarm_story()(story)


def test_a_session_in_line_for_cache_keeps_the_stream_that_waits_for_it() -> None:
    async def story(swarm: MemorySwarm) -> None:
        limits = SessionLimits(cache_wait_s=10, attach_timeout_s=2)
        await swarm.serve("full", "0:8", cache_tokens=128, limits=limits)
        client, other = await swarm.client("client"), await swarm.client("other")
        first, second = [await other.start_session(swarm.model, max_tokens=64) for _ in range(2)]
        opening = asyncio.create_task(client.start_session(swarm.model, max_tokens=64))
        await asyncio.sleep(5)
        assert not opening.done()
        first.close()
        session = await opening
        assert await feed(session, [1]) == whole_model(8, [1])
        assert session.recoveries == 0
        session.close()
        second.close()

    swarm_story()(story)


@pytest.mark.parametrize(("lost", "round_trips"), [(None, 2), ("tail", 4)])
def test_opening_and_recovering_take_no_more_round_trips_than_they_must(lost: str | None, round_trips: int) -> None:
    """To dial a server: 1. For `open`, and our stream beside it: 1. A recovery has heard of the loss half a round trip
    late; its replay goes by way of the server before the lost one, and the output comes back: 1.5."""

    async def story(swarm: MemorySwarm) -> None:
        for name, span in (("a", "0:4"), ("b", "4:8"), ("b2", "4:8")):
            await swarm.serve(name, span)
        client = await swarm.client("client")
        await client.router(swarm.model).refresh()
        began = loop_time()
        async with client.open_session(swarm.model, max_tokens=64) as session:
            if lost is not None:
                await feed(session, [1])
                swarm.network.kill(session.route[1].peer_id)
                began = loop_time()
                await feed(session, [2])
            assert loop_time() - began == pytest.approx(2 * LATENCY_S * round_trips, rel=0.01)

    swarm_story(latency_s=LATENCY_S)(story)


def test_a_prompts_chunks_are_on_all_links_at_once() -> None:
    """Four chunks over two links that each take a second for one: five seconds, and not eight."""

    async def story(swarm: MemorySwarm) -> None:
        peers = [(await swarm.serve(name, span)).transport.peer for name, span in (("a", "0:4"), ("b", "4:8"))]
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=2000) as session:
            chunks = [list(range(start, start + 400)) for start in range(0, 1600, 400)]
            steps = [StepInput(hidden_of([chunk]), len(chunk)) for chunk in chunks]
            narrow = LinkConditions(0.0, bytes_per_s=steps[0].hidden.nbytes)
            for one, other in pairwise([client.own_peer, *peers]):
                swarm.network.set_conditions(one, other, narrow)
            began = loop_time()
            outputs = await session.run(steps, want="last")
            assert loop_time() - began == pytest.approx(5, rel=0.05)
            assert outputs[-1] is not None
            assert numbers_of(outputs[-1]) == whole_model(8, range(1600))[-1:]

    swarm_story()(story)


def test_a_lost_server_is_replaced_and_the_text_goes_on() -> None:
    async def story(swarm: MemorySwarm) -> None:
        for name, span in (("a", "0:3"), ("b", "3:6"), ("c", "6:8"), ("b2", "3:8")):
            await swarm.serve(name, span)
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=32) as session:
            got = await feed(session, [1, 2])
            victim = next(hop for hop in session.route if hop.start == 3).peer_id
            swarm.network.kill(victim)
            got += await feed(session, [3])
            assert victim not in {hop.peer_id for hop in session.route}
            got += await feed(session, [4])
            assert got == whole_model(8, [1, 2, 3, 4])
            assert session.recoveries == 1

    swarm_story()(story)


def test_too_long_is_said_before_sending_with_the_two_numbers() -> None:
    async def story(swarm: MemorySwarm) -> None:
        handler = await swarm.serve("a", "0:8")
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=4) as session:
            await feed(session, [1, 2, 3])
            steps = handler.counters.steps
            with pytest.raises(BadInput, match=r"opened for 4 tokens; 3 are held, 2 more"):
                await feed(session, [4, 5])
            assert handler.counters.steps == steps
            assert await feed(session, [4]) == whole_model(8, [1, 2, 3, 4])[3:]

    swarm_story()(story)


def test_twenty_sessions_of_one_client_share_one_control_stream_and_do_not_mix() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("a", "0:4")
        await swarm.serve("b", "4:8")
        client = await swarm.client("client")

        async def one(seed: int) -> None:
            async with client.open_session(swarm.model, max_tokens=16) as session:
                inputs = [seed * 10 + number for number in range(6)]
                got = [number for value in inputs for number in await feed(session, [value])]
                assert got == whole_model(8, inputs)

        await asyncio.gather(*(one(seed) for seed in range(20)))
        assert [handler.num_control_streams for handler in swarm.handlers.values()] == [1, 1]

    swarm_story()(story)


def test_a_server_leaves_at_once_when_clients_are_connected_that_ask_for_nothing() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await swarm.serve("server", "0:8")
        client = await swarm.client("client")
        async with client.open_session(swarm.model, max_tokens=8) as session:
            await feed(session, [1])
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await swarm.leave("server")
        assert asyncio.get_running_loop().time() - began < 1

    swarm_story()(story)
