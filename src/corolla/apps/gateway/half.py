"""The local half of a model in two strides, so that one thread can carry many answers at once.

`client/model.py` blocks a thread while the swarm works. Here a forward stops where block 0 would run (`to_blocks`),
and is run once more, with what the blocks gave, when that has come (`to_logits`). The embeddings are looked up twice;
the head, which is what costs, runs once.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from corolla.models.checkpoint import Checkpoint
from corolla.models.local_half import BlocksCall, LocalCache, LocalHalf, load_local_half


class _BlocksWantedError(Exception):
    """Carries what the blocks are asked for out of the family's forward."""

    def __init__(self, call: BlocksCall) -> None:
        self.call = call


_given: ContextVar[Tensor | None] = ContextVar("given", default=None)
"""What the blocks gave; None in the first stride."""


class _SteppedHalf(LocalHalf):
    """The family's model whose blocks are somebody else's business."""

    def run_blocks(self, call: BlocksCall) -> Tensor:
        given = _given.get()
        if given is None:
            raise _BlocksWantedError(call)
        return given


@dataclass(slots=True)
class Stride:
    """What goes to the blocks, and all that the second stride needs."""

    token_ids: Tensor
    call: BlocksCall


class TwoStrideModel:
    """Embeddings, norm and head of one model. For one thread at a time."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype | None = None) -> None:
        self._half: Any = load_local_half(checkpoint, _SteppedHalf, dtype=dtype)
        self._half.eval()
        self._keeps_last = {"logits_to_keep": 1} if self._half._supports_logits_to_keep() else {}
        self.dtype: torch.dtype = self._half.dtype
        self.vocabulary: int = self._half.get_output_embeddings().weight.shape[0]
        self.generation_config: Any = self._half.generation_config

    def new_cache(self) -> LocalCache:
        """Of a session that holds nothing yet."""
        return LocalCache(self._half.config)

    @torch.inference_mode()
    def to_blocks(self, cache: LocalCache, token_ids: Tensor) -> Stride:
        """The embeddings of `token_ids` [rows, new_tokens], as they arrive at block 0."""
        try:
            self._forward(cache, token_ids)
        except _BlocksWantedError as wanted:
            return Stride(token_ids, wanted.call)
        raise AssertionError("block 0 is where every forward stops")

    @torch.inference_mode()
    def to_logits(self, strides: Sequence[Stride], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each stride's last position, [rows, vocabulary]; their caches count its tokens from now on.

        Strides of several answers share one pass: behind the blocks, no position looks at another.
        """
        if len(strides) == 1:
            stride = strides[0]
            return [self._through_head(stride.call.cache, stride.token_ids, outputs[0])]
        rows = torch.cat([stride.token_ids[:, -1:] for stride in strides])
        last = torch.cat([output[..., -1:, :] for output in outputs])
        logits = self._through_head(self.new_cache(), rows, last)
        for stride in strides:
            stride.call.cache.advance(stride.token_ids.shape[1])
        return list(logits.split([stride.token_ids.shape[0] for stride in strides]))

    def _through_head(self, cache: LocalCache, token_ids: Tensor, output: Tensor) -> Tensor:
        given = _given.set(output)
        try:
            return cast("Tensor", self._forward(cache, token_ids).logits)[:, -1]
        finally:
            _given.reset(given)

    def _forward(self, cache: LocalCache, token_ids: Tensor) -> Any:
        arguments = {self._half.structure.cache_argument: cache, "use_cache": True, **self._keeps_last}
        return self._half(input_ids=token_ids, **arguments)
