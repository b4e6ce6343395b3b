"""The models that a gateway answers for: local half, tokenizer, and what the checkpoint says of sampling and length."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from corolla.apps.gateway.half import TwoStrideModel
from corolla.apps.gateway.sampling import Sampling
from corolla.client.router import ServedModel
from corolla.errors import BadInput
from corolla.models.checkpoint import Checkpoint
from corolla.models.disk_cache import Say
from corolla.models.source import open_model_source
from corolla.models.source_options import SourceOptions
from corolla.models.tensors import TORCH_DTYPES
from corolla.models.transfer import Progress
from corolla.wire.tensors import DType

UNKNOWN_CONTEXT_TOKENS: Final = 8192
"""For a model whose config does not say; as much as a server takes by default."""


@dataclass(slots=True)
class GatewayModel:
    """One model, ready to write. `half` and `tokenizer` belong to the torch thread, `prompt_tokenizer` to another."""

    served: ServedModel
    half: TwoStrideModel
    tokenizer: PreTrainedTokenizerBase
    prompt_tokenizer: PreTrainedTokenizerBase
    """A copy: a tokenizer is not for two threads, and reading a long prompt must not hold up everybody's next token."""
    end_tokens: frozenset[int]
    context_tokens: int
    defaults: Sampling
    """What the checkpoint says, for requests that say nothing."""
    created: int

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def chat_template(self) -> str | None:
        template = getattr(self.tokenizer, "chat_template", None)
        return template if isinstance(template, str) else None


def load_models(
    names: Sequence[str], *, dtype: str | None, source: SourceOptions, progress: Progress, say: Say
) -> dict[str, GatewayModel]:
    """Local halves by display name. Raises BadInput for a model that cannot be read, or one named twice.

    `progress` is told how a download goes and may end it, `say` what else takes long.
    """
    chosen = None if dtype is None else TORCH_DTYPES[cast("DType", dtype)]
    models: dict[str, GatewayModel] = {}
    for name in names:
        checkpoint = open_model_source(name, source, has_tokenizer=True, progress=progress, say=say)
        model = load_model(checkpoint, dtype=chosen)
        if model.name in models:
            raise BadInput(f"two models are called {model.name}: a request could not say which one it means")
        models[model.name] = model
    return models


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    half: TwoStrideModel | None = None,
) -> GatewayModel:
    """The local half of one checkpoint and its tokenizer."""
    half = half or TwoStrideModel(checkpoint, dtype=dtype)
    tokenizer = load_tokenizer(checkpoint.directory)
    return GatewayModel(
        served=ServedModel.of(checkpoint, name=name),
        half=half,
        tokenizer=tokenizer,
        prompt_tokenizer=copy.deepcopy(tokenizer),
        end_tokens=_end_tokens(half, tokenizer),
        context_tokens=checkpoint.max_positions or UNKNOWN_CONTEXT_TOKENS,
        defaults=_defaults(half.generation_config),
        created=int(time.time()),
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises BadInput when there is none in the directory."""
    transformers.utils.logging.set_verbosity_error()
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except (OSError, ValueError) as wrong:
        raise BadInput(f"{directory} has no tokenizer that can be read: {str(wrong).splitlines()[0]}") from wrong


def _end_tokens(half: TwoStrideModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Those of the generation config (an instruct model's end of turn is there), and the tokenizer's own."""
    said = [half.generation_config.eos_token_id, cast("Any", tokenizer).eos_token_id]
    return frozenset(token for one in said for token in (one if isinstance(one, list) else [one]) if token is not None)


def _defaults(config: Any) -> Sampling:
    """OpenAI's defaults (temperature 1), unless the model's own `generation_config.json` asks for something else."""
    if not config.do_sample:
        return Sampling()
    return Sampling(
        temperature=1.0 if config.temperature is None else float(config.temperature),
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=int(config.top_k or 0),
    )
