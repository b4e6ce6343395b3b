"""Head and tail of a Llama by hand, for benchmarks that drive sessions without `generate`."""

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
    epsilon: float

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Self:
        embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
        output = "lm_head.weight" if "lm_head.weight" in checkpoint.tensors else embedding  # tied
        weights = [read_tensor(checkpoint.tensors[name]).to(dtype) for name in (embedding, norm, output)]
        return cls(*weights, epsilon=float(str(checkpoint.config["rms_norm_eps"])))

    def head(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.embedding)

    def tail(self, hidden: Tensor) -> Tensor:
        """The likeliest token after the last position."""
        normed = functional.rms_norm(hidden[:, -1], (hidden.shape[-1],), self.norm, self.epsilon)
        return functional.linear(normed, self.output).argmax(-1)
