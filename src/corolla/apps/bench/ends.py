"""Head and tail of S by hand, for benchmarks that drive sessions without `generate`."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from corolla.models.checkpoint import Checkpoint
from corolla.models.stored import read_tensor


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, norm and output matrix."""

    embedding: Tensor
    norm: Tensor
    output: Tensor

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Self:
        names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        return cls(*(read_tensor(checkpoint.tensors[name]).to(dtype) for name in names))

    def head(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.embedding)

    def tail(self, hidden: Tensor) -> Tensor:
        """The likeliest token after the last position."""
        normed = functional.rms_norm(hidden[:, -1], (hidden.shape[-1],), self.norm, 1e-6)
        return functional.linear(normed, self.output).argmax(-1)
