"""MiniMax brings a cache class of its own; its calls are answered from the layers that transformers' common one has.

Its forward insists on that class only where it may make a cache itself, which it may not: a span's is always given.
"""

from types import MappingProxyType
from typing import Final

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from corolla.models.special import Special


class LinearCacheCalls:
    """The two calls of `MiniMaxCache` that its lightning attention makes."""

    layers: list[LinearAttentionLayer]

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state after the last position; None before the first."""
        return self.layers[layer_idx].recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        layer = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True


SPECIAL: Final = Special(
    cache_calls=LinearCacheCalls, arguments=MappingProxyType({"use_cache": False}), has_own_cache=True
)
