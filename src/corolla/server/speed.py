"""How fast the hosted blocks run here: a few steps at start, good enough to compare servers by."""

import time

import torch

from corolla.models.cache import SpanCache
from corolla.models.span import Span

DECODE_STEPS = 4
PREFILL_TOKENS = 64


def measure_speed(span: Span) -> tuple[float, float]:
    """(decode, prefill) in tokens a second through all hosted blocks, one row."""
    cache = span.new_cache(1)
    prompt = torch.zeros(1, PREFILL_TOKENS, span.hidden_size, dtype=span.dtype, device=span.device)
    token_ids = torch.zeros(1, PREFILL_TOKENS, dtype=torch.int64, device=span.device)
    prefill_s = _seconds(span, cache, prompt, token_ids)
    decodes = [_seconds(span, cache, prompt[:, :1], token_ids[:, :1]) for _ in range(DECODE_STEPS)]
    return 1 / min(decodes), PREFILL_TOKENS / prefill_s


def _seconds(span: Span, cache: SpanCache, hidden: torch.Tensor, token_ids: torch.Tensor) -> float:
    began = time.perf_counter()
    output = span.forward(hidden, cache, token_ids=token_ids)
    output.flatten()[0].item()  # a GPU works behind our back: wait for its result
    return max(time.perf_counter() - began, 1e-9)
