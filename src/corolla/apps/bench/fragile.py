"""Text written through a session that loses hops' state on purpose, while all servers live on.

As if a server had been replaced by another between two steps: killing processes by the dozen would measure how fast
they start. The client tells the hop's server to drop the session, and then finds out like anybody else.
"""

import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import torch

from corolla.apps.bench.ends import Ends
from corolla.client.session import Session
from corolla.models.tensors import to_torch, to_wire
from corolla.wire import messages as wire

NEVER: Final = frozenset[tuple[int, int]]()
Loss = tuple[int, int]
"""(step, stage): the stage loses the session's state just before that step."""


class FragileSession(Session):
    """A session whose hops can be made to forget it."""

    def lose(self, stage: int) -> None:
        """The hop at this place of the route drops the session; nobody tells the session."""
        hop = self._ring.hops[stage]
        hop.link.send(wire.Close(session=hop.session))


@dataclass(slots=True)
class Written:
    """A text and the seconds that each of its steps took; the first step is the prompt's."""

    tokens: list[int] = field(default_factory=list[int])
    steps_s: list[float] = field(default_factory=list[float])
    recoveries: int = 0

    @property
    def decode_s(self) -> float:
        return sum(self.steps_s[1:])


async def write(
    session: FragileSession, ends: Ends, prompt: torch.Tensor, num_tokens: int, losses: Collection[Loss] = NEVER
) -> Written:
    """`num_tokens` greedy tokens after `prompt` [1, tokens]. Head and tail run here, between the steps."""
    written = Written()
    token_ids = prompt
    with torch.inference_mode():
        for number in range(num_tokens):
            for step, stage in losses:
                if step == number:
                    session.lose(stage)
            began = time.perf_counter()
            output = await session.step(to_wire(ends.head(token_ids)), num_tokens=token_ids.shape[1], want="last")
            assert output is not None
            token_ids = ends.tail(to_torch(output))[None]
            written.steps_s.append(time.perf_counter() - began)
            written.tokens.append(int(token_ids))
    written.recoveries = session.recoveries
    return written


def draw_losses(rng: random.Random, num_steps: int, num_stages: int, rate: float) -> list[Loss]:
    """Each request to a stage, but the prompt's, loses its state with this probability."""
    return [(step, stage) for step in range(1, num_steps) for stage in range(num_stages) if rng.random() < rate]
