"""How much of a model this server hosts, and the loading of it. Imports torch; for a thread beside the event loop.

A span that the user names is hosted whatever it takes, with a warning where it does not fit. Otherwise as many blocks
are hosted as fit into what is free now (`memory.py`): all of them, or some, of which the swarm decides which
(`placing.py`).
"""

import asyncio
import gc
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, cast

import torch

from corolla.ids import Fingerprint
from corolla.models.checkpoint import Checkpoint
from corolla.models.description import CacheNeeds, ModelDescription, describe_model
from corolla.models.disk_cache import user_cache
from corolla.models.frugal import give_back_freed
from corolla.models.loading import load_span
from corolla.models.span import Span
from corolla.models.tensors import TORCH_DTYPES
from corolla.server.config import ServerConfig
from corolla.server.device import free_memory_bytes
from corolla.server.memory import MemoryNeeds, MemoryPlan, headroom, plan_memory, transition
from corolla.server.span import TorchSpanRunner
from corolla.server.speed import Speed, SpeedKey, recall_speed, remember_speed, remembered_speed

log = logging.getLogger(__name__)

SESSION_TOKENS: Final = 2048
"""A usual session: over so many tokens the cost of a row (recurrent states) is spread, and windows stop growing."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many blocks fit here, and what decides which."""

    plan: MemoryPlan
    cuts: frozenset[int] | None
    """Borders at which the model can be cut; None: all."""
    on_disk: frozenset[int]
    """Blocks that need not be downloaded."""
    dtype: str
    expected_speed: Speed | None
    """Of so many blocks, as an earlier start here measured it."""


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """A span that has passed its self-test, and how fast it is."""

    span: Span
    speed: Speed


class Host:
    """One model on this machine, loaded as the config says."""

    def __init__(self, config: ServerConfig, checkpoint: Checkpoint, model: Fingerprint) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.model = model
        self._dtype = None if config.dtype == "auto" else TORCH_DTYPES[config.dtype]
        self._speeds_file = user_cache() / "speeds.json"

    def begin(self) -> LoadedSpan | Room:
        """The span that the user names, or all blocks if they fit, loaded; else how many fit. Raises BadInput."""
        named = self.config.span_of(self.checkpoint.name, self.checkpoint.num_blocks)
        if named is not None:
            free_bytes = free_memory_bytes(self.config.device)
            loaded = self.load(*named)
            self._tell_memory(loaded.span, free_bytes)
            return loaded
        room = self.find_room()
        log.info(room.plan.sentence)
        whole = self.checkpoint.num_blocks
        return self.load(0, whole) if room.plan.num_blocks == whole else room

    def find_room(self) -> Room:
        """What fits into the memory that is free now. Raises BadInput, with the numbers, when not one block does."""
        config = self.config
        about = describe_model(self.checkpoint, dtype=self._dtype, quantization=config.quantization)
        needs = memory_needs(about, config.cache_tokens)
        plan = plan_memory(
            free_memory_bytes(config.device), needs,
            num_blocks=config.num_blocks, journal_bytes=config.limits.max_journal_bytes,
        )  # fmt: skip
        everywhere = about.cuts == tuple(range(1, about.num_blocks))
        return Room(
            plan=plan,
            cuts=None if everywhere else frozenset(about.cuts),
            on_disk=frozenset(block for block, lacks in enumerate(about.block_missing_bytes) if not lacks),
            dtype=about.dtype,
            expected_speed=recall_speed(self._key(_dtype_called(about.dtype), plan.num_blocks), self._speeds_file),
        )

    def load(self, start: int, end: int) -> LoadedSpan:
        """Blocks `[start, end)`. Raises BadInput, or what getting them from a hub raised."""
        began = time.perf_counter()
        config = self.config
        span = load_span(
            self.checkpoint, start, end, dtype=self._dtype, device=config.device, quantization=config.quantization
        )
        key = self._key(span.dtype, span.num_blocks)
        speed = remembered_speed(span, key, self._speeds_file, prepare=partial(self.use_tapes, span))
        give_back_freed()
        seconds = round(time.perf_counter() - began, 1)
        log.info("span loaded", extra={"blocks": f"{start}:{end}", "read_bytes": span.read_bytes, "seconds": seconds})
        return LoadedSpan(span, speed)

    def use_tapes(self, span: Span) -> None:
        """Let decode steps run from tapes. On the thread that computes steps; takes some of its time."""
        if (
            self.config.quantization == "none"
        ):  # quantized layers keep state of their own, which a recording could disturb
            span.use_tapes()

    def remember(self, span: Span, speed: Speed) -> None:
        """Keep for the next start what real work has shown."""
        remember_speed(self._key(span.dtype, span.num_blocks), speed, self._speeds_file)

    def _key(self, dtype: torch.dtype, num_blocks: int) -> SpeedKey:
        return SpeedKey(self.model, self.config.device, dtype, num_blocks, self.config.quantization)

    def _tell_memory(self, span: Span, free_bytes: int) -> None:
        """Say in one line what hosting takes, and warn when the cache, once full, would not fit."""
        cache_bytes = self.config.cache_tokens * span.capabilities.cache_bytes_per_token
        plan = MemoryPlan(
            num_blocks=span.num_blocks,
            of_blocks=self.checkpoint.num_blocks,
            free_bytes=free_bytes,
            weights_bytes=span.weight_bytes,
            cache_bytes=cache_bytes,
            headroom_bytes=headroom(free_bytes),
            cache_tokens=self.config.cache_tokens,
            journal_bytes=self.config.limits.max_journal_bytes,
        )
        log.info(plan.sentence)
        if span.weight_bytes + cache_bytes > free_bytes:
            log.warning("a full cache would not fit into the free memory: serve fewer blocks, or pass --cache-tokens")


class SpanLoader:
    """`moving.Loader`: other blocks of the model, on the device that serves."""

    def __init__(self, host: Host, plan: MemoryPlan) -> None:
        self._host = host
        self._plan = plan

    async def load(self, span: range) -> tuple[TorchSpanRunner, Speed]:
        loaded = await asyncio.to_thread(self._load, span)
        return TorchSpanRunner(loaded.span), loaded.speed

    def order(self, num_blocks: int) -> Literal["load_first", "leave_first"]:
        _give_back_memory()
        return transition(free_memory_bytes(self._host.config.device), self._plan, num_blocks)

    def _load(self, span: range) -> LoadedSpan:
        _give_back_memory()  # of blocks that nobody holds any more
        loaded = self._host.load(span.start, span.stop)
        self._host.use_tapes(loaded.span)
        return loaded


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def memory_needs(about: ModelDescription, cache_tokens: int) -> MemoryNeeds:
    """What `plan_memory` asks, of a described model."""
    return MemoryNeeds(
        block_bytes=about.block_bytes,
        cache_bytes_per_token=max(map(_cache_bytes_per_token, about.block_cache)),
        cache_tokens=cache_tokens,
        side_bytes=about.side_bytes,
    )


def _dtype_called(name: str) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, name))


def _cache_bytes_per_token(needs: CacheNeeds) -> int:
    return math.ceil(needs.bytes_for(SESSION_TOKENS) / SESSION_TOKENS)
