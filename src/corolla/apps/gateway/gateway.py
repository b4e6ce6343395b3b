"""One gateway: its models on one swarm, and all that requests share. The web side (`app.py`) stands on it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial

from corolla.apps.gateway.config import GatewayConfig
from corolla.apps.gateway.conversations import Conversations
from corolla.apps.gateway.errors import ApiError
from corolla.apps.gateway.generation import Answer, Generator, Worker
from corolla.apps.gateway.keys import ApiKey
from corolla.apps.gateway.limits import Limits
from corolla.apps.gateway.metrics import GatewayMetrics
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.prompts import Prepared, PromptMaker
from corolla.apps.gateway.tokens import TokenNames
from corolla.apps.gateway.torch_thread import TorchThread
from corolla.apps.gateway.traces import TraceStore
from corolla.apps.gateway.writing import Piece
from corolla.client.swarm import Swarm
from corolla.clock import loop_time
from corolla.errors import NoRoute, SwarmError
from corolla.ids import PeerId

Prepare = Callable[[PromptMaker, int], Prepared]
"""Makes a request ready, given the longest context."""
READY_TIMEOUT_S = 5.0


class Gateway:
    """Belongs to the event loop it was made on; `close` ends what it holds."""

    def __init__(self, swarm: Swarm, models: Mapping[str, GatewayModel], config: GatewayConfig) -> None:
        self.swarm = swarm
        self.models = dict(models)
        self.config = config
        self.traces = TraceStore()
        self.metrics = GatewayMetrics()
        self.limits = Limits(max_active=config.max_active, max_waiting=config.max_waiting, wait_s=config.wait_s)
        self.conversations = Conversations(swarm, keep_s=config.keep_s, max_kept=config.max_kept, wait_s=config.wait_s)
        self.names = {name: TokenNames(model.tokenizer) for name, model in self.models.items()}
        self._torch = TorchThread()
        self._prompts = Worker("gateway-prompts")
        self._makers = {
            name: PromptMaker(model, default_new_tokens=config.default_new_tokens)
            for name, model in self.models.items()
        }
        self._generator = Generator(swarm, self.conversations, self._torch, self.metrics)
        self._watch_numbers()

    async def answer(
        self, key: ApiKey, model: GatewayModel, prepare: Prepare
    ) -> AsyncGenerator[tuple[Answer, Prepared, list[Piece]]]:
        """Stand in line, then write. Close the generator to stop: then nothing is held any more."""
        asked_at, finish = loop_time(), "cancelled"
        async with self.limits.admit(key):
            prepared = await self._prompts.run(partial(prepare, self._makers[model.name], self.context_tokens(model)))
            trace = self.traces.begin(model=model.name, owner=key.id, now=time.time())
            answer = Answer(model, prepared.wanted, key.id, trace)
            try:
                async with aclosing(self._generator.write(answer)) as written:
                    async for pieces in written:
                        if answer.completion_tokens == len(pieces):
                            self.metrics.first_token_s.labels(model.name).observe(loop_time() - asked_at)
                        finish = next((piece.finish for piece in pieces if piece.finish), finish)
                        yield answer, prepared, pieces
            except Exception:
                finish = "error"
                raise
            finally:
                trace.finish(finish)
                self._count(answer, finish, loop_time() - asked_at)

    def context_tokens(self, model: GatewayModel) -> int:
        """Longest text: what the model knows, and what a server takes."""
        servers = self.swarm.router(model.served).view.servers.values()
        longest = max((server.announcement.max_session_tokens for server in servers), default=model.context_tokens)
        return min(model.context_tokens, longest)

    def find_model(self, name: str) -> GatewayModel:
        """Raises ApiError 404 with the models that there are."""
        model = self.models.get(name)
        if model is None:
            served = ", ".join(self.models)
            asked = name if len(name) <= 64 else f"{name[:64]}…"
            raise ApiError(404, f"there is no model {asked!r} here; served: {served}", "model_not_found", "model")
        return model

    async def lacking(self, silent: frozenset[PeerId] = frozenset()) -> dict[str, str]:
        """The models that nobody could use now, and why; `silent` servers are not counted on."""
        lacking: dict[str, str] = {}
        for name, model in self.models.items():
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await self.swarm.router(model.served).find_route(tokens_needed=1, without=silent)
            except (NoRoute, SwarmError) as error:
                lacking[name] = str(error)
            except TimeoutError:
                lacking[name] = f"the swarm did not answer within {READY_TIMEOUT_S:g} s"
        return lacking

    async def close(self) -> None:
        self.conversations.close()
        await asyncio.to_thread(self._torch.close)
        await asyncio.to_thread(self._prompts.close)

    def _count(self, answer: Answer, finish: str, total_s: float) -> None:
        name, metrics = answer.model.name, self.metrics
        metrics.answers.labels(name, finish).inc()
        metrics.answer_s.labels(name).observe(total_s)
        metrics.tokens.labels(name, "prompt").inc(len(answer.wanted.prompt))
        metrics.tokens.labels(name, "cached").inc(answer.cached_tokens)
        metrics.tokens.labels(name, "answer").inc(answer.completion_tokens)

    def _watch_numbers(self) -> None:
        watch = self.metrics.watch
        watch("active_answers", "Answers being written now.", lambda: self.limits.active)
        watch("waiting_requests", "Requests that stand in line.", lambda: self.limits.waiting)
        watch("kept_sessions", "Sessions kept for the next message.", lambda: self.conversations.num_kept)
        counters = self.conversations.counters
        total = self.metrics.watch_total
        total("sessions_opened", "Sessions opened on the swarm.", lambda: counters.opened)
        total("sessions_continued", "Kept sessions that an answer went on from.", lambda: counters.continued)
