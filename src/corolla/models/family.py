"""A model family as transformers knows it: its config, its class, and what its forward takes.

Everything is found out from the family itself: signatures, and a run of its forward on the meta device, which costs
no memory. There is no list of families here.
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from corolla.errors import BadInput
from corolla.models.building import building
from corolla.models.cache import with_calls
from corolla.models.checkpoint import Checkpoint
from corolla.models.dataflow import Dataflow, plain_chain, watch_blocks
from corolla.models.dataless import Dataless
from corolla.models.skeleton import CACHE_ARGUMENTS, BlockList, Exit, PassThrough, SpanDone, find_blocks, text_config
from corolla.models.special import ORDINARY, Special, special_for

log = logging.getLogger(__name__)

Axis = Literal["batch", "tokens"]

_ORDINARY_INPUTS: Final = frozenset(
    {
        *("self", "args", "kwargs", "hidden_states", "x", "attention_mask", "position_ids", "position_embeddings"),
        *(*CACHE_ARGUMENTS, "layer_past", "use_cache", "output_attentions", "output_router_logits"),
        *("alibi", "position_bias", "causal_mask", "cache_position", "cos", "sin", "rope_emb", "layer_idx"),
    }
)
"""What blocks take that is the hidden state, or made of positions and masks alone."""

CODE_FAILS: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What a family's code may raise when it is run in a way that it was not written for, without values among them."""

_CONFIG_FAILS: Final = (*CODE_FAILS, ArithmeticError, StrictDataclassError)
"""What a family's code may raise over a config that makes no sense."""

_MOST_SAID: Final = 200
"""Characters of another's error that fit into a sentence."""

_PROBE_BATCH, _PROBE_LENGTH = 13, 17
"""Sizes no family has as another dimension, so that each axis of the stream is known by its length."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What a family's forward takes, and what flows between its blocks."""

    family: str
    takes_position_ids: bool
    cache_argument: str
    embedding_size: int
    stream_shape: tuple[Axis | int, ...]
    """Shape of the hidden state between blocks: `("batch", "tokens", hidden_size)` for most families."""
    stream_dtype: torch.dtype
    """The model's, but for families that keep their residuals in float32."""
    special: Special = ORDINARY
    extra_width: int = 0
    """Numbers that travel behind the hidden state's own (`Special.extra_width`)."""

    @property
    def own_width(self) -> int:
        """Numbers for each position that reach block 0."""
        return math.prod(size for size in self.stream_shape if isinstance(size, int))

    @property
    def width(self) -> int:
        """Numbers for each position of each row that travel between blocks: `hidden_size` for most families."""
        return self.own_width + self.extra_width

    def check_stream(self, stream: Tensor) -> None:
        """Raises BadInput for what blocks do not take: embeddings of a user's own, of another size."""
        sizes = list(stream.shape)
        if len(sizes) != len(self.stream_shape) or any(
            isinstance(wanted, int) and wanted != size for wanted, size in zip(self.stream_shape, sizes, strict=True)
        ):
            wanted = ", ".join(map(str, self.stream_shape))
            raise BadInput(f"what would go to the first block is {sizes}; {self.family} takes [{wanted}]")

    def flatten(self, stream: Tensor) -> Tensor:
        """The hidden state as it travels: [batch, tokens, width]."""
        if self._is_flat:
            missing = self.width - stream.shape[-1]
            return functional.pad(stream, (0, missing)) if missing else stream
        axes = self.stream_shape.index("batch"), self.stream_shape.index("tokens")
        return stream.movedim(axes, (0, 1)).flatten(2)

    def unflatten(self, hidden: Tensor) -> Tensor:
        """The hidden state as blocks take it."""
        if self._is_flat:
            return hidden
        axes = self.stream_shape.index("batch"), self.stream_shape.index("tokens")
        sizes = [size for size in self.stream_shape if isinstance(size, int)]
        return hidden.unflatten(2, sizes).movedim((0, 1), axes).contiguous()

    @property
    def _is_flat(self) -> bool:
        return self.stream_shape[:2] == ("batch", "tokens") and len(self.stream_shape) == 3


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' config of the checkpoint. Raises BadInput where transformers knows no such thing."""
    model_type = str(checkpoint.config["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"{checkpoint.directory / 'config.json'}: this transformers knows no family {model_type!r}")
    num_blocks, num_tensors = checkpoint.num_blocks, len(checkpoint.tensors)
    if num_blocks > num_tensors:  # each has one of its own at least; building thousands for nothing takes minutes
        raise BadInput(f"{checkpoint.name}: config.json says {num_blocks} blocks, the files hold {num_tensors} tensors")
    try:
        with quiet():
            return CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
    except _CONFIG_FAILS as failure:
        raise BadInput(
            f"{checkpoint.directory / 'config.json'}: no config of {model_type} for this transformers "
            f"({transformers_version}): {in_a_line(failure)}"
        ) from failure


def causal_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's class with a language model's head. Raises BadInput when it has none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        file = checkpoint.directory / "config.json"
        raise BadInput(f"{file}: {config.model_type} is not a decoder that transformers knows")
    return cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def outline_of(family: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without its weights (meta device), made ready as its family needs it.

    Raises BadInput, with what transformers' code says, when it cannot be built.
    """
    try:
        with building, torch.device("meta"), quiet():
            # What `AutoModel.from_config` calls; from there one cannot get at a class of our own.
            outline = family._from_config(copy.deepcopy(config), dtype=dtype)  # pyright: ignore[reportPrivateUsage]
    except _CONFIG_FAILS as failure:
        raise BadInput(
            f"{config.model_type}: this transformers ({transformers_version}) cannot build it from its config.json "
            f"({in_a_line(failure)}): the config is damaged, or made for another version"
        ) from failure
    special_for(str(config.model_type)).prepare(outline)
    return outline


def inspect_family(outline: PreTrainedModel) -> Structure:
    """What the family's forward takes and what arrives at its first block. `outline` is left as it was.

    Raises BadInput when the family's blocks cannot be told apart or run one without the other.
    """
    place = find_blocks(outline)
    family = str(outline.config.model_type)
    special = special_for(family)
    if not special.has_own_cache and not _has_ordinary_cache(outline):
        raise BadInput(f"{family}: keeps its state in a way of its own, which corolla does not know")
    parameters = inspect.signature(type(place.runner).forward).parameters
    stream = _stream_at_first_block(outline, place)
    axes: dict[int, Axis] = {_PROBE_BATCH: "batch", _PROBE_LENGTH: "tokens"}
    return Structure(
        family=family,
        takes_position_ids="position_ids" in parameters,
        cache_argument=next(name for name in CACHE_ARGUMENTS if name in parameters),
        embedding_size=_embedding_size(outline),
        stream_shape=tuple(axes.get(size, size) for size in stream.shape),
        stream_dtype=stream.dtype,
        special=special,
        extra_width=special.extra_width(text_config(outline.config)),
    )


def watch_family(outline: PreTrainedModel, structure: Structure) -> Dataflow:
    """What flows between the family's blocks besides the hidden state. `outline` is left as it was.

    Raises BadInput when the family cannot be cut at all.
    """
    special = structure.special
    cache = with_calls(DynamicCache, special.cache_calls)(config=text_config(outline.config))
    place = find_blocks(outline)

    def run(token_ids: Tensor) -> None:
        place.runner(
            **{"input_ids": token_ids, "use_cache": True, structure.cache_argument: cache, **special.arguments}
        )

    try:
        with quiet():
            return watch_blocks(outline, place, run, cache)
    except BadInput as failure:
        raise BadInput(f"{structure.family}: {failure}") from None
    except CODE_FAILS as failure:
        return _trusted(structure, place, failure)


def in_a_line(failure: Exception) -> str:
    """An error of another's code for a sentence: its class, since some texts say nothing alone, and its text."""
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:_MOST_SAID]}" if text else type(failure).__name__


def _trusted(structure: Structure, place: BlockList, failure: Exception) -> Dataflow:
    """For code that cannot be watched: a plain chain, if the blocks take nothing out of the ordinary."""
    taken = {name for block in place.blocks for name in inspect.signature(type(block).forward).parameters}
    if strange := sorted(taken - _ORDINARY_INPUTS):
        raise BadInput(
            f"{structure.family}: its code cannot be watched ({in_a_line(failure)}), and its blocks "
            f"take {', '.join(strange)}: whether it can be cut is not known (docs/families.md says what to do)"
        ) from failure
    log.warning("a family's code cannot be watched; taken as a plain chain", extra={"family": structure.family})
    return plain_chain(len(place.blocks))


def _has_ordinary_cache(outline: PreTrainedModel) -> bool:
    """Whether transformers' common cache class serves the family: its own word, no signature says it."""
    says = cast("Callable[[], bool] | None", getattr(outline, "_supports_default_dynamic_cache", None))
    return says is None or says()


def _embedding_size(outline: PreTrainedModel) -> int:
    weight = outline.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[-1])


def _stream_at_first_block(outline: PreTrainedModel, place: BlockList) -> Tensor:
    """Run the outline up to block 0: what comes there, without data."""
    first = place.blocks[0]
    place.blocks[0] = Exit(PassThrough(first, None))
    token_ids = torch.zeros(_PROBE_BATCH, _PROBE_LENGTH, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), quiet(), Dataless():
            place.runner(input_ids=token_ids, use_cache=False)
    except SpanDone as done:
        return done.hidden
    except CODE_FAILS as failure:
        raise BadInput(
            f"{outline.config.model_type}: its code does not run up to its first block ({in_a_line(failure)}), "
            "so it cannot be cut (docs/families.md says what to do)"
        ) from failure
    finally:
        place.blocks[0] = first
    raise BadInput(f"{outline.config.model_type}: its code runs without its first block, so it cannot be cut")


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
