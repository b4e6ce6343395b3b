"""The KV cache of a span: as long as the whole model, holding tensors for the hosted blocks only.

The family's forward asks its cache for lengths and mask sizes, of block 0 as a rule, whoever hosts that. So there is a
layer for each block: hosted ones are real, the others are ghosts of the real layer's own class that store nothing and
answer from one shared counter. A plain attention layer is replaced by `GrowingLayer`, which writes into preallocated
buffers: `torch.cat` costs 44 µs a block and token at 512 tokens, and grows; this costs 12.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache as memoize
from typing import Final, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from corolla.errors import NeedsReplay

GROWTH_TOKENS: Final = 256
"""Buffers grow by this many positions: a session holds at most so many more than it uses."""

SLIDING_SLACK_TOKENS: Final = 64
"""Positions that a sliding layer keeps beyond its window, so that as many can be trimmed (rejected drafts)."""


class Position:
    """How many positions a cache holds; one object shared by the cache and its ghosts."""

    __slots__ = ("num_tokens",)

    def __init__(self) -> None:
        self.num_tokens = 0


class GrowingLayer(DynamicLayer):
    """A full-attention layer in buffers that grow by `GROWTH_TOKENS`.

    `keys` and `values` [rows, heads, tokens, head_dim] are views of the buffers' filled part. A crop shortens the
    view; rows gathered into tensors of their own get room to grow at the next update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self.buffers = self.keys, self.values
        keys, values = self.keys, self.values
        assert keys is not None, "set with the buffers"
        assert values is not None, "set with the buffers"
        self.buffers = (
            _with_room(self.buffers[0], keys, key_states.shape[-2]),
            _with_room(self.buffers[1], values, value_states.shape[-2]),
        )
        self.keys = _append(self.buffers[0], keys.shape[-2], key_states)
        self.values = _append(self.buffers[1], values.shape[-2], value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.keys is not None and self.values is not None:
            self.buffers = self.keys, self.values  # the old ones are free at once, not at the next update

    def reset(self) -> None:
        super().reset()
        self.buffers = None


def _with_room(buffer: Tensor, filled: Tensor, num_new: int) -> Tensor:
    """`buffer` when `filled` is its beginning and `num_new` more positions fit, else a larger one that begins so."""
    used = filled.shape[-2]
    if filled.data_ptr() == buffer.data_ptr() and used + num_new <= buffer.shape[-2]:
        return buffer
    larger = filled.new_empty((*filled.shape[:-2], used + num_new + GROWTH_TOKENS, filled.shape[-1]))
    larger.narrow(-2, 0, used).copy_(filled)
    return larger


def _append(buffer: Tensor, used: int, new: Tensor) -> Tensor:
    """Write `new` behind the `used` positions; the filled part of the buffer."""
    buffer.narrow(-2, used, new.shape[-2]).copy_(new)
    return buffer.narrow(-2, 0, used + new.shape[-2])


@memoize
def _ghost_class(kind: type[object]) -> type[object]:
    """A subclass of a cache layer's class that stores nothing and answers questions of length from `position`."""

    def get_seq_length(self: "_Ghost") -> int:
        return self.position.num_tokens

    def get_mask_sizes(self: "_Ghost", query_length: int) -> tuple[int, int]:
        seen = self.position.num_tokens
        if not self.is_sliding:
            return seen + query_length, 0
        return min(seen, self.sliding_window - 1) + query_length, max(seen - self.sliding_window + 1, 0)

    def has_previous_state(self: "_Ghost") -> dict[int, bool]:
        return dict.fromkeys(range(self.number_of_states), self.position.num_tokens > 0)

    # With its parent's layer type, transformers would put the new class in the parent's place everywhere.
    members: dict[str, object] = {"_layer_type": None}
    if issubclass(kind, CacheLayerMixin):
        members |= {"get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes, "is_sliding": _is_sliding(kind)}
    if issubclass(kind, LinearAttentionCacheLayerMixin):
        members |= {"has_previous_state": property(has_previous_state)}
    return type(f"Ghost{kind.__name__}", (kind,), members)


class _Ghost(DynamicSlidingWindowLayer):
    """What the functions of a ghost class may count on; only for the type checker."""

    position: Position
    number_of_states: int


def _is_sliding(kind: type[object]) -> bool:
    return bool(getattr(kind, "is_sliding", False))


class GhostedCache(DynamicCache):
    """A cache as long as the whole model's, of which the layers in `hosted` are real and the others ghosts."""

    def __init__(self, config: PreTrainedConfig, hosted: Container[int]) -> None:
        super().__init__(config=config)
        self.position = Position()
        for index, layer in enumerate(self.layers):
            if index in hosted:
                self.layers[index] = GrowingLayer() if type(layer) is DynamicLayer else layer
            elif isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin):
                self.layers[index] = _ghost(layer, self.position)

    @property
    def num_tokens(self) -> int:
        """Positions held, of each row."""
        return self.position.num_tokens


def _ghost(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin, position: Position) -> CacheLayerMixin:
    ghost = cast("_Ghost", layer)
    ghost.__class__ = cast("type[_Ghost]", _ghost_class(type(layer)))
    ghost.position = position
    return ghost


Kind = TypeVar("Kind", bound=DynamicCache)


@memoize
def with_calls(kind: type[Kind], calls: type) -> type[Kind]:
    """`kind`, answering a family's own `calls` too; `object`: there are none."""
    return kind if calls is object else cast("type[Kind]", type(kind.__name__, (kind, calls), {}))


class SpanCache(GhostedCache):
    """What one session holds on a server: the state of blocks `[start, end)` for `rows` sequences.

    `hosted` are the layers that those blocks use: one each, for most families.
    """

    def __init__(self, config: PreTrainedConfig, start: int, end: int, rows: int, hosted: Sequence[int]) -> None:
        super().__init__(config, hosted)
        self.start = start
        self.end = end
        self.rows = rows
        self._hosted = tuple(hosted)
        self._hosted_layers = cast("list[CacheLayerMixin]", [self.layers[index] for index in hosted])
        self._sliding_layers = [layer for layer in self._hosted_layers if _is_plain_sliding(layer)]
        for layer in self._sliding_layers:
            layer.activate_past_recording()

    @property
    def grows_only(self) -> bool:
        """Whether every hosted layer is a plain attention layer, and nothing else is kept."""
        return type(self) is SpanCache and all(type(layer) is GrowingLayer for layer in self._hosted_layers)

    def put(self, layer: Callable[[int], CacheLayerMixin], num_tokens: int) -> None:
        """Let `layer(index)` stand for each hosted layer, as if `num_tokens` positions were held."""
        for index in self._hosted:
            self.layers[index] = layer(index)
        self.position.num_tokens = num_tokens

    def equals(self, other: "SpanCache") -> bool:
        """Whether both hold the very same bits."""
        held, others = ([*map(_tensors, cache._hosted_layers)] for cache in (self, other))
        return self.num_tokens == other.num_tokens and all(
            len(mine := list(left)) == len(theirs := list(right)) and all(map(torch.equal, mine, theirs))
            for left, right in zip(held, others, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this cache, unused room included."""
        return sum(tensor.nbytes for layer in self._hosted_layers for tensor in _allocated(layer))

    @property
    def used_bytes(self) -> int:
        """Bytes of what is held: `nbytes` without the room to grow."""
        return sum(tensor.nbytes for layer in self._hosted_layers for tensor in _tensors(layer))

    def used_bytes_of(self, layers: Sequence[int]) -> int:
        """Bytes of what these layers hold."""
        return sum(
            tensor.nbytes for index in layers for tensor in _tensors(cast("CacheLayerMixin", self.layers[index]))
        )

    def most_tokens_of(self, layers: Sequence[int]) -> int | None:
        """How many positions these layers hold at most; None: as many as the session has."""
        bounds = [_most_tokens(cast("CacheLayerMixin", self.layers[index])) for index in layers]
        return None if None in bounds else max((bound for bound in bounds if bound is not None), default=None)

    def advance(self, num_tokens: int) -> None:
        """Count positions that the blocks have just taken in."""
        self.position.num_tokens += num_tokens
        for layer in self._sliding_layers:
            _drop_beyond_slack(layer)

    def can_trim(self, num_tokens: int) -> bool:
        """Whether the cache can be brought back to `num_tokens` positions exactly."""
        if not 0 <= num_tokens <= self.num_tokens:
            return False
        num_removed = self.num_tokens - num_tokens
        return num_removed == 0 or all(_can_remove(layer, num_removed) for layer in self._hosted_layers)

    @torch.inference_mode()
    def trim(self, num_tokens: int) -> None:
        """Forget every position from `num_tokens` on. Raises NeedsReplay when the state cannot be brought back."""
        if not self.can_trim(num_tokens):
            raise NeedsReplay(
                f"the cache of {self.num_tokens} positions cannot be brought back to {num_tokens}",
                value=str(num_tokens),
                bound=str(self.num_tokens),
            )
        num_removed = self.num_tokens - num_tokens
        if num_removed:
            for layer in self._hosted_layers:
                cast("DynamicLayer", layer).crop(-num_removed)
        self.position.num_tokens = num_tokens

    @torch.inference_mode()
    def gather(self, rows: Sequence[int]) -> None:
        """Make row `i` what row `rows[i]` was: reorder, repeat or drop rows."""
        assert all(0 <= row < self.rows for row in rows), "the session checks rows before"
        if list(rows) != list(range(self.rows)):
            index = torch.tensor(list(rows), dtype=torch.int64)
            for layer in self._hosted_layers:
                layer.reorder_cache(cast("torch.LongTensor", index))
            self.rows = len(rows)


def _most_tokens(layer: CacheLayerMixin) -> int | None:
    if type(layer) is DynamicSlidingWindowLayer:
        return most_sliding_tokens(layer.sliding_window)
    return layer.sliding_window if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer) else None


def _is_plain_sliding(layer: CacheLayerMixin) -> TypeGuard[DynamicSlidingWindowLayer]:
    """Whether a layer is a window of keys and no more: what also has a recurrent state cannot go back anyway."""
    return isinstance(layer, DynamicSlidingWindowLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)


def most_sliding_tokens(sliding_window: int) -> int:
    """How many positions a plain sliding layer holds at most, between two steps."""
    keep = sliding_window - 1 + SLIDING_SLACK_TOKENS
    return keep + max(SLIDING_SLACK_TOKENS, keep // 4)  # not a copy for every token


def _drop_beyond_slack(layer: DynamicSlidingWindowLayer) -> None:
    keep = layer.sliding_window - 1 + SLIDING_SLACK_TOKENS
    if layer.keys is not None and layer.keys.shape[-2] > most_sliding_tokens(layer.sliding_window):
        layer.keys = layer.keys[..., -keep:, :].clone()
        layer.values = cast("Tensor", layer.values)[..., -keep:, :].clone()


def _can_remove(layer: CacheLayerMixin, num_removed: int) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # a recurrent state keeps no past
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return layer.is_croppable
    num_stored = 0 if layer.keys is None else layer.keys.shape[-2]
    num_left = layer.get_seq_length() - num_removed
    return num_stored - num_removed >= min(layer.sliding_window - 1, num_left)


def _allocated(layer: CacheLayerMixin) -> Iterable[Tensor]:
    return layer.buffers or () if isinstance(layer, GrowingLayer) else _tensors(layer)


def _tensors(layer: CacheLayerMixin) -> Iterable[Tensor]:
    """Every tensor a layer keeps, whatever its kind; states may stand in dicts, window sizes are 0-dimensional."""
    for value in vars(layer).values():
        values = cast("dict[object, object]", value).values() if isinstance(value, dict) else (value,)
        yield from (item for item in values if isinstance(item, Tensor) and item.ndim > 0)
