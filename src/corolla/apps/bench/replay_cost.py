"""What a substitute cannot do without: computing the lost server's part of the history again, in this process."""

import time
from functools import cache
from pathlib import Path

import torch

from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.tensors import to_wire
from corolla.server.config import SessionLimits
from corolla.server.span import TorchSpanRunner
from corolla.wire.messages import Step

RUNS = 3


@cache
def _runner(model: Path, span: tuple[int, int]) -> TorchSpanRunner:
    return TorchSpanRunner(load_span(open_checkpoint(model), *span))


def replay_cost_s(model: Path, span: tuple[int, int], num_tokens: int) -> float:
    """Least seconds of a few prefills of that many tokens through the span, in chunks as long as a server takes."""
    runner = _runner(model, span)
    return min(_prefill_s(runner, num_tokens) for _ in range(RUNS))


def _prefill_s(runner: TorchSpanRunner, num_tokens: int) -> float:
    facts, most = runner.facts, SessionLimits().max_chunk_tokens
    cache = runner.new_cache(facts.start, facts.end, num_tokens)
    hidden = torch.randn(1, num_tokens, facts.hidden_size)
    steps = [
        Step(step_no=start, position=start, hidden=to_wire(hidden[:, start : start + most]))
        for start in range(0, num_tokens, most)
    ]
    began = time.perf_counter()
    for step in steps:
        runner.run(cache, step, "none", "float32")
    return time.perf_counter() - began
