"""One greedy generation with a clock, over the swarm or plain transformers alike: what benchmarks compare."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from transformers.generation.streamers import BaseStreamer

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@dataclass(slots=True)
class Generation:
    """Tokens and when they came, in seconds of `time.perf_counter()`."""

    began: float
    times: list[float] = field(default_factory=list[float])
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.began

    @property
    def steps_s(self) -> list[float]:
        """Seconds between tokens: every step but the prompt's."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps_s)


class _Clock(BaseStreamer):
    def __init__(self, generation: Generation, on_token: Callable[[int], None]) -> None:
        self._generation = generation
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # transformers gives the prompt first
            self._is_prompt = False
            return
        self._generation.times.append(time.perf_counter())
        self._on_token(len(self._generation.times))

    def end(self) -> None:
        return


def _ignore(_number: int) -> None:
    return


def generate(
    model: torch.nn.Module,
    prompt: torch.Tensor,
    num_tokens: int,
    *,
    on_token: Callable[[int], None] = _ignore,
    **options: Any,
) -> Generation:
    """`num_tokens` greedy tokens after `prompt`. `on_token` hears each token's number, from 1 on, between two steps."""
    generation = Generation(time.perf_counter())
    generation.tokens = cast("Any", model).generate(
        prompt, max_new_tokens=num_tokens, streamer=_Clock(generation, on_token), **GREEDY, **options
    )
    return generation


def prompt_of(num_tokens: int) -> torch.Tensor:
    """Random tokens, the same ones every time."""
    return torch.randint(5, 32000, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
