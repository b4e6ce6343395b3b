"""Answers, many at a time: a session for each, one thread for all of torch, and the event loop between them.

    prompt → torch thread: embeddings → `Session.run`: the swarm → torch thread: head, sampling, text → pieces
                                              ↑______________________________________________|

Whoever reads the pieces sets the pace: while a slow reader does not take one, only that answer waits.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import torch

from corolla.apps.gateway.conversations import Conversations, Lent
from corolla.apps.gateway.half import Stride
from corolla.apps.gateway.metrics import GatewayMetrics
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.torch_thread import TorchThread
from corolla.apps.gateway.traced_route import describe_route
from corolla.apps.gateway.traces import AnswerTrace
from corolla.apps.gateway.writing import Piece, Wanted, Writing
from corolla.client.chunks import cut_into_steps
from corolla.client.session import RouteHop
from corolla.client.swarm import Swarm
from corolla.models.tensors import to_torch, wire_dtype
from corolla.wire.tensors import WireTensor

T = TypeVar("T")


class Worker:
    """One thread that works for the event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True)
class Answer:
    """One answer on its way: what it was asked, and what is known of it so far."""

    model: GatewayModel
    wanted: Wanted
    owner: str
    trace: AnswerTrace
    cached_tokens: int = 0
    """Of the prompt, what the servers held already."""
    completion_tokens: int = 0


class Generator:
    """Writes answers on one swarm."""

    def __init__(
        self, swarm: Swarm, conversations: Conversations, torch_thread: TorchThread, metrics: GatewayMetrics
    ) -> None:
        self._swarm = swarm
        self._conversations = conversations
        self._torch = torch_thread
        self._metrics = metrics

    async def write(self, answer: Answer) -> AsyncGenerator[list[Piece]]:
        """Pieces of text as they come; close the generator to stop. Raises what `Session.run` raises."""
        wanted, model = answer.wanted, answer.model
        room = len(wanted.prompt) + wanted.max_new_tokens - 1  # the last token is never fed back
        lent = await self._conversations.take(
            model, answer.owner, wanted.prompt,
            room=room, rows=wanted.num_choices, wire_dtype=wire_dtype(model.half.dtype),
        )  # fmt: skip
        answer.cached_tokens = lent.cache.num_tokens
        writing: Writing | None = None
        try:
            writing = await self._torch.run(lambda: Writing(model, wanted, lent.cache))
            async with aclosing(self._steps(answer, lent, writing)) as steps:
                async for pieces in steps:
                    answer.completion_tokens += len(pieces)
                    yield pieces
        finally:
            if writing is not None and writing.is_complete:
                self._conversations.give_back(lent, [*wanted.prompt, *writing.choices[0].tokens])
            else:
                self._conversations.drop(lent)

    async def _steps(self, answer: Answer, lent: Lent, writing: Writing) -> AsyncGenerator[list[Piece]]:
        session, route, recoveries = lent.session, list[RouteHop](), lent.session.recoveries
        began = time.perf_counter()
        stride: Stride | None = await self._torch.run(writing.begin)
        while stride is not None:
            call = stride.call
            steps = cut_into_steps(
                session, call.hidden, max_chunk_tokens=self._swarm.config.max_chunk_tokens,
                position_ids=call.position_ids, token_ids=call.token_ids,
            )  # fmt: skip
            sent = time.perf_counter()
            outputs = await session.run(steps, want="last" if call.last_only else "all")
            came = time.perf_counter()
            done = await self._torch.go_on(writing, stride, _joined(outputs))
            total_s = time.perf_counter() - began
            if session.route != route or session.recoveries != recoveries:
                route = session.route
                self._trace_route(answer, lent)
            num_new = call.hidden.shape[1]
            answer.trace.saw_step(
                "prefill" if answer.completion_tokens == 0 else "decode",
                tokens=num_new, total_s=total_s, local_s=total_s - (came - sent), chunks=session.chunk_timings,
            )  # fmt: skip
            self._metrics.saw_step(
                answer.model.name, new_tokens=num_new, total_s=came - sent, timings=session.timings,
                follows_decode=answer.trace.num_steps > 2,
            )  # fmt: skip
            self._metrics.saw_recoveries(answer.model.name, session.recoveries - recoveries)
            recoveries = session.recoveries
            if done.gather is not None:
                session.gather(done.gather)
            stride = done.stride
            yield done.pieces
            began = time.perf_counter()

    def _trace_route(self, answer: Answer, lent: Lent) -> None:
        router = self._swarm.router(answer.model.served)
        tokens_needed = lent.room * answer.wanted.num_choices
        used, runner_up = describe_route(
            router, lent.session.route, self._swarm.config.cost, tokens_needed=tokens_needed
        )
        answer.trace.took_route(used, runner_up)


def _joined(outputs: Sequence[WireTensor | None]) -> torch.Tensor:
    tensors = [to_torch(output) for output in outputs if output is not None]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-2)
