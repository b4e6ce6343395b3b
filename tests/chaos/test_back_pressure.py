"""A slow tail slows the head: nothing piles up in front of it, neither steps nor bytes, on any server or the client.

At most four steps of a session in line at each server, and with what is unsent at most 8 MB of them and the last step
taken; whatever the length of a prompt or of a replay.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from corolla.apps.sim.paced import Pace, PacedExecutor
from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.config import ClientConfig
from corolla.client.session import Session, StepInput
from corolla.clock import loop_time
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.server.hosted import WINDOW_BYTES, WINDOW_STEPS
from corolla.server.runner import SessionCache, SpanFacts
from corolla.wire.messages import Step, Want
from corolla.wire.tensors import DType, WireTensor

HIDDEN_SIZE = 2048
CHUNK_TOKENS = 128
CHUNK_BYTES = CHUNK_TOKENS * HIDDEN_SIZE * 4
NUM_CHUNKS = 40
MOST_BYTES = WINDOW_BYTES + 2 * CHUNK_BYTES
"""The window, the step that went over it, and what frames and headers add."""
UNREAD_STEPS = 1
"""What is left over of the bytes of one reading."""
SLOW_S = 0.5


class EchoSpan:
    """Gives back what it gets: wide hidden states cost nothing but their bytes."""

    def __init__(self, start: int, end: int, executor: PacedExecutor) -> None:
        self.facts = SpanFacts(start, end, HIDDEN_SIZE, "float32")
        self._executor = executor

    def new_cache(self, start: int, end: int, max_tokens: int) -> SessionCache:
        return EchoCache()

    def run(self, cache: SessionCache, step: Step, want: Want, wire_dtype: DType) -> WireTensor | None:
        self._executor.spend()
        if want == "none":
            return None
        if want == "all":
            return step.hidden
        rows, _, size = step.hidden.shape
        return WireTensor("float32", (rows, 1, size), bytes(step.hidden.data)[-4 * size :])


class EchoCache:
    num_tokens = 0


@dataclass(slots=True)
class Most:
    """The most that was seen at any time."""

    in_line: int = 0
    unread: int = 0
    server_bytes: int = 0
    client_bytes: int = 0
    seen: int = field(default=0)

    def look(self, swarm: MemorySwarm, session: Session) -> None:
        self.seen += 1
        for handler in swarm.handlers.values():
            for hosted in handler.sessions.values():
                self.in_line = max(self.in_line, hosted.accepted - hosted.finished)
                self.unread = max([self.unread, *(len(link.unread) for link in hosted.links.values())])
                waiting = hosted.accepted_bytes - hosted.finished_bytes
                if hosted.push.channel is not None:
                    waiting += hosted.push.channel.pending_bytes
                self.server_bytes = max(self.server_bytes, waiting)
        self.client_bytes = max([self.client_bytes, *(hop.pending_bytes for hop in session._ring.hops)])

    def assert_bounded(self) -> None:
        assert self.seen > 100
        assert self.in_line <= WINDOW_STEPS
        assert self.unread <= UNREAD_STEPS
        assert self.server_bytes <= MOST_BYTES
        assert self.client_bytes <= MOST_BYTES


async def keep_looking(swarm: MemorySwarm, session: Session, most: Most) -> None:
    while True:
        most.look(swarm, session)
        await asyncio.sleep(0.02)


def chunks() -> Iterator[StepInput]:
    for _ in range(NUM_CHUNKS):
        yield StepInput(WireTensor("float32", (1, CHUNK_TOKENS, HIDDEN_SIZE), bytes(CHUNK_BYTES)), CHUNK_TOKENS)


async def serve(swarm: MemorySwarm, name: str, span: str, step_s: float) -> None:
    start, end = map(int, span.split(":"))
    executor = Pace(step_s).executor
    await swarm.serve(
        name, span, runner=EchoSpan(start, end, executor), executor=executor, cache_tokens=1 << 14,
        limits=SessionLimits(max_chunk_tokens=CHUNK_TOKENS),
    )  # fmt: skip


def test_a_long_prompt_waits_at_its_source_for_a_slow_tail() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=6) as swarm:
            for name, span, step_s in (("a", "0:2", 0.01), ("b", "2:4", 0.01), ("c", "4:6", SLOW_S)):
                await serve(swarm, name, span, step_s)
            client, most = await swarm.client("client"), Most()
            async with client.open_session(swarm.model, max_tokens=8192) as session, asyncio.TaskGroup() as group:
                looking = group.create_task(keep_looking(swarm, session, most))
                began = loop_time()
                await session.run(list(chunks()), want="last")
                assert loop_time() - began < 1.1 * NUM_CHUNKS * SLOW_S  # the tail never waits, and nobody else counts
                looking.cancel()
            most.assert_bounded()

    run_virtual(told())


def test_a_long_replay_waits_at_its_source_for_a_slow_server() -> None:
    """Two places are built anew, of which the second is slow: the first pushes on what it recomputes."""

    async def told() -> None:
        async with MemorySwarm(num_blocks=6) as swarm:
            for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
                await serve(swarm, name, span, 0.01)
            client, most = await swarm.client("client", ClientConfig(shun_s=1000)), Most()
            async with client.open_session(swarm.model, max_tokens=8192) as session:
                await session.run(list(chunks()), want="last")
                await serve(swarm, "B", "2:4", 0.01)
                await serve(swarm, "C", "4:6", SLOW_S)
                for name in ("b", "c"):
                    swarm.network.kill(swarm.handlers[name].transport.peer)
                async with asyncio.TaskGroup() as group:
                    looking = group.create_task(keep_looking(swarm, session, most))
                    await session.run([next(chunks())], want="last")
                    looking.cancel()
                assert session.recoveries == 1
            most.assert_bounded()

    run_virtual(told())
