"""A family whose state cannot be taken back: a trim builds every cache anew, and the user sees none of it."""

import pytest

from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import ToySpan, hidden_of, numbers_of, whole_model
from corolla.client.config import ClientConfig
from corolla.client.session import Session
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual
from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

NUM_BLOCKS = 6


class StubbornSpan(ToySpan):
    """Says that it cannot trim, and is never asked to."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(start, end)
        self.facts = SpanFacts(start, end, self.facts.hidden_size, self.facts.dtype, can_trim=False)

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        assert step.trim_to in (None, cache.num_tokens)
        return super().run(cache, step, want, wire_dtype)


async def feed(session: Session, rows: list[list[int]], new: list[list[int]]) -> list[list[int]]:
    rows = [row + more for row, more in zip(rows or [[] for _ in new], new, strict=True)]
    output = await session.step(hidden_of(new), num_tokens=len(new[0]), want="all")
    assert output is not None
    assert numbers_of(output) == [n for row in rows for n in whole_model(NUM_BLOCKS, row)[-len(new[0]) :]]
    return rows


@pytest.mark.parametrize("spans", [["0:6"], ["0:2", "2:4", "4:6"]])
@pytest.mark.parametrize("kept", [0, 1, 3, 12])
@pytest.mark.parametrize("is_lost_too", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_trim_of_a_state_that_cannot_be_trimmed_rebuilds_it(
    spans: list[str], kept: int, *, is_lost_too: bool, exact: bool
) -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.01)) as swarm:
            for number, span in enumerate(spans * 2):
                await swarm.serve(f"s{number}", span, runner=StubbornSpan(*map(int, span.split(":"))))
            client = await swarm.client("client", ClientConfig(exact=exact))
            async with client.open_session(swarm.model, max_tokens=64, max_rows=2) as session:
                rows = await feed(session, [], [[1, 2, 3, 4], [5, 6, 7, 8]])
                for number in range(10):  # more than are kept as they were sent
                    rows = await feed(session, rows, [[10 + number], [30 + number]])
                session.gather([1, 0])
                rows = await feed(session, rows[::-1], [[40], [41]])
                session.trim(kept)
                if kept:
                    session.gather([1, 1])
                rows = [rows[1][:kept], rows[1][:kept]]
                if is_lost_too:
                    swarm.network.kill(session.route[-1].peer_id)
                rows = await feed(session, rows, [[50, 51], [52, 53]])
                assert session.recoveries <= 2
                rows = await feed(session, rows, [[54], [55]])
                swarm.network.kill(session.route[0].peer_id)
                if not is_lost_too or len(spans) > 1:
                    await feed(session, rows, [[56], [57]])

    run_virtual(told(), limit_s=1000)


def test_an_exact_session_repeats_the_same_steps_after_a_trim_however_often_it_is_rebuilt() -> None:
    """Kernels round with a step's shape: what was cut off by the trim stays cut off as it was."""

    class RecordingSpan(StubbornSpan):
        def __init__(self) -> None:
            super().__init__(0, NUM_BLOCKS)
            self.lengths: list[int] = []

        def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
            self.lengths = [*(self.lengths if cache.num_tokens else []), step.hidden.shape[1]]
            return super().run(cache, step, want, wire_dtype)

    async def told() -> None:
        async with MemorySwarm(num_blocks=NUM_BLOCKS, conditions=LinkConditions(0.01)) as swarm:
            spans = {name: RecordingSpan() for name in ("a", "b", "c")}
            for name, span in spans.items():
                await swarm.serve(name, "0:6", runner=span)
            client = await swarm.client("client", ClientConfig(exact=True))
            async with client.open_session(swarm.model, max_tokens=64) as session:
                rows = await feed(session, [], [[1, 2, 3, 4]])
                rows = await feed(session, rows, [[5, 6, 7]])
                rows = await feed(session, rows, [[8]])
                session.trim(6)
                rows = await feed(session, [rows[0][:6]], [[9]])
                for number in range(2):
                    swarm.network.kill(session.route[0].peer_id)
                    rows = await feed(session, rows, [[10 + number]])
                assert sorted(span.lengths for span in spans.values()) == [
                    [4, 2, 1], [4, 2, 1, 1], [4, 2, 1, 1, 1]
                ]  # fmt: skip

    run_virtual(told(), limit_s=1000)
