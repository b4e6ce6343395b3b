"""Keeps the announced speed true by real work: a moving mean over steps. Pure but for its own few numbers; no torch."""

from typing import Final

GAIN: Final = 0.05
"""Weight of one step; some twenty make a new mean, so that one long pass with strangers does not."""
LEAST_TOKENS: Final = 16
"""A prefill chunk of fewer tokens says little of prefill."""


class SpeedMeter:
    """Tokens a second through all hosted blocks, one row: as measured at start, then as seen."""

    def __init__(self, num_blocks: int, *, decode_tokens_per_s: float, prefill_tokens_per_s: float) -> None:
        self._num_blocks = num_blocks
        self.decode_tokens_per_s = decode_tokens_per_s
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def saw_step(self, *, new_tokens: int, rows: int, num_blocks: int, compute_s: float) -> None:
        """A step of `new_tokens` in each of `rows` ran through `num_blocks` of the blocks in this time."""
        if compute_s <= 0 or num_blocks < 1:
            return
        whole_s = compute_s * self._num_blocks / num_blocks
        if new_tokens == 1:
            self.decode_tokens_per_s = _moved(self.decode_tokens_per_s, 1 / whole_s)
        elif new_tokens * rows >= LEAST_TOKENS:
            self.prefill_tokens_per_s = _moved(self.prefill_tokens_per_s, new_tokens * rows / whole_s)


def _moved(old: float, new: float) -> float:
    return new if old <= 0 else old + GAIN * (new - old)
