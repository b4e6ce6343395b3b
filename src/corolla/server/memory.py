"""How many blocks fit into this device's memory, and why. Pure; said in one line when a server starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from corolla.errors import BadInput
from corolla.wire.tensors import ITEM_BYTES

HEADROOM_SHARE: Final = 0.2
"""Of the free memory: activations, the allocator's gaps and everything else on the machine (others measured 20 %)."""
LEAST_HEADROOM_BYTES: Final = 256 << 20
JOURNAL_SHARE: Final = 0.25
"""Of the machine's free memory, where the blocks and the cache lie in the device's own."""
LEAST_JOURNAL_BYTES: Final = 64 << 20
QUANTIZED_BITS: Final[dict[str, float]] = {"int8": 8.08, "nf4": 4.29}
"""Bits of one weight, its share of scales included (predecessor: 8 and 4.25, plus 1 %)."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What hosting takes, in bytes."""

    block_bytes: Sequence[int]
    """Weights of each block of the model, as they are held: see `weight_bytes`."""
    cache_bytes_per_token: int
    """Keys and values of one position in one block."""
    cache_tokens: int
    """Positions that all sessions together may hold."""
    side_bytes: int = 0
    """Weights outside the blocks, which every server of some families holds besides."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A number of blocks that fits wherever they lie in the model, and what it takes."""

    num_blocks: int
    of_blocks: int
    free_bytes: int
    weights_bytes: int
    cache_bytes: int
    headroom_bytes: int
    cache_tokens: int
    journal_bytes: int = 0
    """Of the machine's memory: on a device without its own, a part of the headroom."""

    @property
    def sentence(self) -> str:
        """For the log: what is hosted and where the memory goes."""
        return (
            f"hosting {self.num_blocks} of {self.of_blocks} blocks: {_gib(self.weights_bytes)} of weights and "
            f"{_gib(self.cache_bytes)} of cache for {self.cache_tokens} tokens, in {_gib(self.free_bytes)} of free "
            f"memory, of which {_gib(self.headroom_bytes)} are left alone; what sessions pushed on takes at most "
            f"{_gib(self.journal_bytes)} of the machine's memory"
        )


def plan_memory(
    free_bytes: int, needs: MemoryNeeds, *, num_blocks: int | None = None, journal_bytes: int = 0
) -> MemoryPlan:
    """As many blocks as fit, or `num_blocks` if they do. Raises BadInput with the numbers when they do not.

    Blocks differ in some models (a few dense ones before many of experts): what is planned with is the largest, so
    that the server may move to any of them.
    """
    of_blocks = len(needs.block_bytes)
    headroom_bytes = headroom(free_bytes)
    cache_bytes = needs.cache_tokens * needs.cache_bytes_per_token
    each_bytes = max(needs.block_bytes) + cache_bytes
    fitting = min(max(free_bytes - headroom_bytes - needs.side_bytes, 0) // each_bytes, of_blocks)
    if num_blocks is not None and not 1 <= num_blocks <= of_blocks:
        raise BadInput(f"--num-blocks {num_blocks}: this model has {of_blocks} blocks")
    wanted = num_blocks or 1
    if fitting < wanted:
        raise BadInput(
            f"{wanted} block(s) need {_gib(wanted * each_bytes + needs.side_bytes)} "
            f"(each {_gib(max(needs.block_bytes))} of weights and "
            f"{_gib(cache_bytes)} of cache for {needs.cache_tokens} tokens); {_gib(free_bytes)} are free, of which "
            f"{_gib(headroom_bytes)} are left alone, so {fitting} fit(s): host fewer, or a smaller cache"
        )
    hosted = fitting if num_blocks is None else num_blocks
    return MemoryPlan(
        num_blocks=hosted,
        of_blocks=of_blocks,
        free_bytes=free_bytes,
        weights_bytes=hosted * max(needs.block_bytes) + needs.side_bytes,
        cache_bytes=hosted * cache_bytes,
        headroom_bytes=headroom_bytes,
        cache_tokens=needs.cache_tokens,
        journal_bytes=journal_bytes,
    )


def headroom(free_bytes: int) -> int:
    """Bytes of so much free memory that are left alone."""
    return max(int(HEADROOM_SHARE * free_bytes), LEAST_HEADROOM_BYTES)


def journal_room(free_bytes: int, *, is_shared: bool) -> int:
    """Bytes of the machine's free memory that all sessions' journals may take. `is_shared`: the blocks lie there too;
    then half of what they leave alone."""
    return headroom(free_bytes) // 2 if is_shared else max(int(JOURNAL_SHARE * free_bytes), LEAST_JOURNAL_BYTES)


def weight_bytes(num_weights: int, dtype: str, quantization: str | None = None) -> int:
    """Bytes that these weights take when held in `dtype`, or quantized. Raises BadInput for an unknown kind."""
    if quantization is None:
        return num_weights * ITEM_BYTES[dtype]
    if quantization not in QUANTIZED_BITS:
        raise BadInput(f"quantization {quantization!r} is not one of {', '.join(QUANTIZED_BITS)}")
    return int(num_weights * QUANTIZED_BITS[quantization] / 8)


def transition(free_bytes: int, plan: MemoryPlan, num_new_blocks: int) -> Literal["load_first", "leave_first"]:
    """How to move: load the new blocks beside the old ones where memory allows, so that nobody waits for them."""
    extra_bytes = num_new_blocks * (plan.weights_bytes + plan.cache_bytes) // plan.num_blocks
    return "load_first" if extra_bytes <= free_bytes - plan.headroom_bytes // 2 else "leave_first"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 100 << 20 else f"{num_bytes / (1 << 20):.1f} MiB"
