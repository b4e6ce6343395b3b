"""What a client gets wrong itself it hears at once: nothing is sent, nobody is banned, and the session goes on."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import HIDDEN_SIZE, hidden_of, numbers_of, whole_model
from corolla.client.session import Session, StepInput
from corolla.clock import loop_time
from corolla.errors import BadInput
from corolla.net.memory.loop import run_virtual
from corolla.wire.tensors import DType, WireTensor


def zeros(*shape: int, dtype: DType = "float32") -> WireTensor:
    tensor = WireTensor(dtype, shape, b"")
    return WireTensor(dtype, shape, bytes(tensor.nbytes))


def ids(*shape: int, dtype: DType = "int64") -> WireTensor:
    return zeros(*shape, dtype=dtype)


NEXT = hidden_of([[3], [4]])
MISTAKES = {
    "hidden size": StepInput(zeros(2, 1, HIDDEN_SIZE + 1), 1),
    "rank": StepInput(zeros(2, HIDDEN_SIZE), 1),
    "no sides": StepInput(zeros(), 1),
    "no tokens": StepInput(zeros(2, 0, HIDDEN_SIZE), 0),
    "number of tokens": StepInput(NEXT, 2),
    "dtype": StepInput(zeros(2, 1, HIDDEN_SIZE, dtype="bfloat16"), 1),
    "rows": StepInput(hidden_of([[3]]), 1),
    "position ids": StepInput(NEXT, 1, position_ids=ids(2, 2)),
    "their dtype": StepInput(NEXT, 1, position_ids=ids(2, 1, dtype="float32")),
    "token ids": StepInput(NEXT, 1, token_ids=ids(1, 1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_step_of_a_wrong_shape_reaches_no_server(mistake: str) -> None:
    expect_refused(lambda session: session.run([MISTAKES[mistake]], want="all"))


def test_a_second_chunk_or_left_padding_of_a_wrong_shape_reaches_no_server() -> None:
    expect_refused(lambda session: session.run([StepInput(NEXT, 1), MISTAKES["hidden size"]], want="all"))
    expect_refused(lambda session: session.run([StepInput(NEXT, 1)], want="all", left_padding=[0, 0, 0]))


def expect_refused(attempt: Callable[[Session], Awaitable[object]]) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            handlers = [await swarm.serve("a", "0:2"), await swarm.serve("b", "2:4")]
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=8, max_rows=2) as session:
                await session.step(hidden_of([[1], [2]]), num_tokens=1, want="none")
                before = [(handler.counters.tokens, handler.counters.refusals.copy()) for handler in handlers]
                with pytest.raises(BadInput):
                    await attempt(session)
                assert [(handler.counters.tokens, handler.counters.refusals) for handler in handlers] == before
                output = await session.step(NEXT, num_tokens=1, want="all")
                assert output is not None
                assert numbers_of(output) == [whole_model(4, row)[-1] for row in ([1, 3], [2, 4])]
                assert [
                    handler.counters.tokens - tokens for handler, (tokens, _) in zip(handlers, before, strict=True)
                ] == [2, 2]
                assert session.recoveries == 0
                assert client.router(swarm.model).book.banned(loop_time()) == {}

    run_virtual(told())


def test_the_hidden_size_of_the_model_is_checked_from_the_first_step_on() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            handler = await swarm.serve("a", "0:4")
            client = await swarm.client("client")
            async with client.open_session(replace(swarm.model, hidden_size=HIDDEN_SIZE), max_tokens=8) as session:
                with pytest.raises(BadInput, match=r"float32 \[1, 1, 3\] .*takes float32 \[rows, tokens, 2\]"):
                    await session.step(zeros(1, 1, 3), num_tokens=1, want="all")
                assert not handler.counters.refusals
                output = await session.step(hidden_of([[1]]), num_tokens=1, want="all")
                assert output is not None
                assert numbers_of(output) == whole_model(4, [1])

    run_virtual(told())


@pytest.mark.parametrize("rows", [[2], [-1], []])
def test_rows_that_are_not_there_cannot_be_gathered_and_leave_nothing_behind(rows: list[int]) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            await swarm.serve("a", "0:4")
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=8, max_rows=2) as session:
                await session.step(hidden_of([[1], [2]]), num_tokens=1, want="none")
                with pytest.raises(BadInput, match="the session holds 2"):
                    session.gather(rows)
                output = await session.step(NEXT, num_tokens=1, want="all")
                assert output is not None
                assert numbers_of(output) == [whole_model(4, row)[-1] for row in ([1, 3], [2, 4])]

    run_virtual(told())
