"""A model family as transformers knows it: its config, its class, and what its forward takes.

Everything is found out from the family itself: signatures, and a run of its forward on the meta device, which costs
no memory. There is no list of families here.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from corolla.errors import BadInput
from corolla.models.cache import GhostedCache
from corolla.models.checkpoint import Checkpoint
from corolla.models.skeleton import Exit, PassThrough, SpanDone, find_blocks, text_config

Axis = Literal["batch", "tokens"]

_SIDE_INPUTS: Final = ("input_ids", "per_layer_input", "original_hidden_states")
"""Parameters of a block's forward that are made from token ids, besides the hidden state."""

_PROBE_BATCH, _PROBE_LENGTH = 13, 17
"""Sizes no family has as another dimension, so that each axis of the stream is known by its length."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What a family's forward takes, and what flows between its blocks."""

    family: str
    needs_token_ids: bool
    takes_position_ids: bool
    cache_argument: str
    embedding_size: int
    stream_shape: tuple[Axis | int, ...]
    """Shape of the hidden state between blocks: `("batch", "tokens", hidden_size)` for most families."""

    @property
    def batch_axis(self) -> int:
        return self.stream_shape.index("batch")

    @property
    def token_axis(self) -> int:
        return self.stream_shape.index("tokens")


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' config of the checkpoint. Raises BadInput for a family that transformers does not know."""
    model_type = str(checkpoint.config["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"{checkpoint.directory / 'config.json'}: this transformers knows no family {model_type!r}")
    with quiet():
        return CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))


def causal_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's class with a language model's head. Raises BadInput when it has none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        file = checkpoint.directory / "config.json"
        raise BadInput(f"{file}: {config.model_type} is not a decoder that transformers knows")
    return cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def outline_of(family: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model without its weights (meta device)."""
    with torch.device("meta"), quiet():
        # What `AutoModel.from_config` calls; from there one cannot get at a class of our own.
        return family._from_config(copy.deepcopy(config))  # pyright: ignore[reportPrivateUsage]


def inspect_family(outline: PreTrainedModel) -> Structure:
    """What the family's forward takes and what arrives at its first block. `outline` is left as it was.

    Raises BadInput when the family's blocks cannot be told apart or run one without the other.
    """
    place = find_blocks(outline)
    family = str(outline.config.model_type)
    if not _has_ordinary_cache(outline):
        raise BadInput(f"{family}: keeps its state in a way of its own, which corolla does not know")
    parameters = inspect.signature(type(place.owner).forward).parameters
    if "inputs_embeds" not in parameters:
        raise BadInput(f"{family}: the loop over its blocks takes no embeddings, so it cannot be cut")
    if _needs_token_ids(place.owner, place.blocks[0]):
        raise BadInput(f"{family}: its blocks need token ids beside the hidden state, which corolla does not send yet")
    if getattr(text_config(outline.config), "num_kv_shared_layers", 0):
        raise BadInput(f"{family}: some of its blocks use the cache of others, so it cannot be cut")
    embedding_size = _embedding_size(outline)
    return Structure(
        family=family,
        needs_token_ids=False,
        takes_position_ids="position_ids" in parameters,
        cache_argument=_cache_argument(place.owner),
        embedding_size=embedding_size,
        stream_shape=_stream_shape(outline, embedding_size),
    )


def _needs_token_ids(owner: nn.Module, block: nn.Module) -> bool:
    of_block = inspect.signature(type(block).forward).parameters
    of_owner = inspect.signature(type(owner).forward).parameters
    return any(name in of_block for name in _SIDE_INPUTS) or "per_layer_inputs" in of_owner


def _has_ordinary_cache(outline: PreTrainedModel) -> bool:
    """Whether transformers' common cache class serves the family: its own word, no signature says it."""
    says = cast("Callable[[], bool] | None", getattr(outline, "_supports_default_dynamic_cache", None))
    return says is None or says()


def _cache_argument(owner: nn.Module) -> str:
    """Under which name the family's forward takes its cache."""
    parameters = inspect.signature(type(owner).forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise BadInput(f"{type(owner).__name__}: keeps its state in a way of its own, which corolla does not know")


def _embedding_size(outline: PreTrainedModel) -> int:
    weight = outline.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[-1])


def _stream_shape(outline: PreTrainedModel, embedding_size: int) -> tuple[Axis | int, ...]:
    """Run the outline up to block 0 and look at what comes."""
    place = find_blocks(outline)
    empty = GhostedCache(text_config(outline.config), range(0))
    embeddings = torch.zeros(_PROBE_BATCH, _PROBE_LENGTH, embedding_size, dtype=outline.dtype, device="meta")
    first = place.blocks[0]
    place.blocks[0] = Exit(PassThrough(first, None))
    try:
        place.owner(inputs_embeds=embeddings, use_cache=True, **{_cache_argument(place.owner): empty})
    except RuntimeError:
        # Code that looks at values cannot run without data; the self-test will show whether this is wrong.
        return "batch", "tokens", text_config(outline.config).hidden_size
    except SpanDone as done:
        axes: dict[int, Axis] = {_PROBE_BATCH: "batch", _PROBE_LENGTH: "tokens"}
        return tuple(axes.get(size, size) for size in done.hidden.shape)
    finally:
        place.blocks[0] = first
    raise AssertionError("the family's forward did not reach its first block")


@contextmanager
def quiet() -> Iterator[None]:
    """transformers draws progress bars and warns of things that are meant here; errors still raise."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
