"""The client's half of a model: the family's own model, in which the swarm stands in the place of the blocks.

One ordinary forward does all: embeddings as the family makes them, at block 0 the mixin's `run_blocks`, past the
others, then the family's norm and head. So `generate`, `logits_to_keep`, processors and streamers are transformers'
own, and only embeddings, norm and head are loaded.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from corolla.errors import BadInput
from corolla.models.cache import GhostedCache
from corolla.models.checkpoint import Checkpoint
from corolla.models.family import Structure, causal_class, inspect_family, outline_of, read_config
from corolla.models.loading import checkpoint_dtype, load_pruned, pruned_class
from corolla.models.skeleton import (
    CACHE_ARGUMENTS,
    PassThrough,
    SkeletonBlocks,
    StandIn,
    find_blocks,
    hidden_argument,
    prune,
    text_config,
)


class LocalCache(GhostedCache):
    """The client's cache: holds no tensors, answers for lengths, and passes on what `generate` does to a cache.

    The mixin subclasses it: `trim` and `gather` are the only two changes that transformers asks for.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(text_config(config), range(0))
        self.rows = 0
        """Sequences held; 0 before the first step."""

    def advance(self, num_tokens: int) -> None:
        """Count positions that the swarm has taken in."""
        self.position.num_tokens += num_tokens

    def trim(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` positions of every row."""
        self.position.num_tokens = num_tokens

    def gather(self, rows: Sequence[int]) -> None:
        """Make row `i` what row `rows[i]` was."""
        self.rows = len(rows)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        # Until transformers 5.2x a positive number was the length to keep; now it is minus the number to drop.
        kept = tokens_to_remove if tokens_to_remove > 0 else self.num_tokens + tokens_to_remove
        if kept < self.num_tokens:
            self.trim(max(kept, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.gather(_as_list(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.gather([row for row in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.gather(_as_list(indices))

    def reset(self) -> None:
        self.trim(0)


def _as_list(rows: Tensor) -> list[int]:
    return cast("list[int]", rows.tolist())


@dataclass(frozen=True, slots=True)
class BlocksCall:
    """What the blocks are asked for in one forward of the local half."""

    hidden: Tensor
    """What arrives at block 0, [batch, new_tokens, width]."""
    cache: LocalCache
    """What came before. Advanced by the local half when `run_blocks` returns."""
    position_ids: Tensor | None
    """int64 [batch, new_tokens]; None: counted on from `cache.num_tokens`."""
    left_padding: list[int] | None
    """Padding positions at the left of each row; None: no row has any."""
    token_ids: Tensor | None
    """int64 [batch, new_tokens], unless the caller gave embeddings. They say what the user wrote: send them only to
    servers whose family's blocks need them."""
    last_only: bool
    """Only the last position's hidden state is used: `run_blocks` may return no others."""
    keeps_cache: bool
    """False: nobody will go on from `cache` after this call."""


class LocalHalf:
    """Base of the mixin given to `load_local_half`, which overrides `run_blocks` and, as a rule, `new_local_cache`.

    Its methods come before the family's own. Its `__init__` is not run.
    """

    structure: ClassVar[Structure]

    def run_blocks(self, call: BlocksCall) -> Tensor:
        """The hidden state after the last block, for every position of `call` or for the last one; shaped as it."""
        raise NotImplementedError

    def new_local_cache(self) -> LocalCache:
        """An empty cache, when the caller brought none."""
        return LocalCache(cast("PreTrainedModel", self).config)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, object], *_args: object, **_kwargs: object
    ) -> None:
        """Where `generate` makes its cache: ours, unless the caller brought one or wants none."""
        if generation_config.use_cache is not False and model_kwargs.get(self.structure.cache_argument) is None:
            model_kwargs[self.structure.cache_argument] = self.new_local_cache()


Half = TypeVar("Half", bound=LocalHalf)


def load_local_half(
    checkpoint: Checkpoint, mixin: type[Half], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Half:
    """The family's model with `mixin` before it, its blocks being `mixin.run_blocks`; also a `PreTrainedModel`.

    `dtype` None keeps the checkpoint's own. Raises BadInput when the family cannot be cut.
    """
    config = read_config(checkpoint)
    family = causal_class(checkpoint, config)
    dtype = dtype or checkpoint_dtype(checkpoint, config)
    outline = outline_of(family, config, dtype)
    structure = inspect_family(outline)
    prune(outline, 0, 0, keep_ends=True)
    members = {"structure": structure, "forward": _forward_through_swarm(family, structure)}
    kind = pruned_class(family, 0, 0, keep_ends=True, bases=(mixin,), members=members)
    model, _ = load_pruned(checkpoint, kind, outline, dtype=dtype, device=device, is_mapped=True)
    _put_swarm_in_place(model)
    if (checkpoint.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.directory)
    model.name_or_path = str(checkpoint.directory)
    return cast("Half", model)


def _put_swarm_in_place(model: PreTrainedModel) -> None:
    place = find_blocks(model)
    blocks = list(place.blocks)
    last = cast("PassThrough", blocks[-1])
    blocks[-1] = LastBlock(last.donor, last.num_outputs)
    blocks[0] = SwarmBlock(cast("PassThrough", blocks[0]))
    place.replace(SkeletonBlocks(blocks))


@dataclass(slots=True)
class _Request:
    """One forward under way: what is known of it before the embeddings have run, and what the swarm gave."""

    half: LocalHalf
    cache: LocalCache
    attention_mask: Tensor | None
    position_ids: Tensor | None
    token_ids: Tensor | None
    last_only: bool
    keeps_cache: bool
    output: Tensor | None = None
    """What the last block gives."""

    def run(self, stream: Tensor) -> None:
        """Send what arrives at block 0 through all blocks."""
        structure = self.half.structure
        structure.check_stream(stream)
        hidden = structure.flatten(stream)
        num_rows, num_new, _ = hidden.shape
        if self.cache.rows not in (0, num_rows):
            raise BadInput(f"the cache holds {self.cache.rows} sequences, this input has {num_rows}")
        self.cache.rows = num_rows
        output = self.half.run_blocks(
            BlocksCall(
                hidden=hidden,
                cache=self.cache,
                position_ids=_own_positions(self.position_ids, num_rows, self.cache.num_tokens, num_new),
                left_padding=_left_padding(self.attention_mask, num_rows, self.cache.num_tokens + num_new),
                token_ids=self.token_ids,
                last_only=self.last_only,
                keeps_cache=self.keeps_cache,
            )
        )
        self.cache.advance(num_new)
        # Some families' forwards insist on the length they began with; the head uses the last position only.
        given = output.expand(hidden.shape) if self.last_only else output
        self.output = structure.unflatten(given[..., : structure.own_width])


_request: ContextVar[_Request | None] = ContextVar("request", default=None)
"""The forward under way in this thread: block 0 is called by the family, which does not pass our things on."""


class LastBlock(PassThrough):
    """Stands for the last block: gives what the swarm made of what arrived at the first.

    What the family's loop does between two blocks was done by the servers; what it does after the last is done here.
    """

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        request = _request.get()
        assert request is not None, "block 0 has seen to that"
        return super().__call__(request.output)


class SwarmBlock(StandIn):
    """Stands for block 0: everything between the embeddings and the norm happens in here."""

    def __init__(self, block: PassThrough) -> None:
        super().__init__(block.donor)
        self.__dict__["_block"] = block

    def __call__(self, *args: object, **kwargs: object) -> object:
        request = _request.get()
        if request is None:
            raise BadInput("this model's blocks are elsewhere: call the model itself, not a part of it")
        request.run(cast("Tensor", args[0] if args else hidden_argument(kwargs)))
        return self.__dict__["_block"](*args, **kwargs)


def _forward_through_swarm(family: type[PreTrainedModel], structure: Structure) -> Callable[..., object]:
    """The family's forward, with what the swarm must be told taken from its arguments. Keeps its signature."""
    family_forward = family.forward
    names = [name for name in inspect.signature(family_forward).parameters if name != "self"]

    @functools.wraps(family_forward)
    def forward(self: LocalHalf, *args: object, **kwargs: object) -> object:
        arguments = _named(structure, {**dict(zip(names, args, strict=False)), **kwargs})
        request = _open_request(self, structure, arguments)
        token = _request.set(request)
        try:
            given = {**arguments, structure.cache_argument: request.cache, **structure.special.arguments}
            output = family_forward(self, **given)
        finally:
            _request.reset(token)
        if not request.keeps_cache and hasattr(output, structure.cache_argument):
            setattr(output, structure.cache_argument, None)  # else `generate(use_cache=False)` would go on from it
        return output

    return forward


def _named(structure: Structure, arguments: dict[str, object]) -> dict[str, object]:
    """The arguments with the cache, whatever the caller calls it, under the family's name for it."""
    return {structure.cache_argument if name in CACHE_ARGUMENTS else name: value for name, value in arguments.items()}


def _open_request(half: LocalHalf, structure: Structure, arguments: dict[str, object]) -> _Request:
    for unseen in ("output_hidden_states", "output_attentions"):
        if arguments.get(unseen):
            raise BadInput(f"{unseen} is not possible: what happens inside the blocks stays on the servers")
    cache = arguments.get(structure.cache_argument)
    if cache is not None and not isinstance(cache, LocalCache):
        raise BadInput(f"{type(cache).__name__} cannot hold what servers keep; leave {structure.cache_argument} out")
    return _Request(
        half=half,
        cache=half.new_local_cache() if cache is None else cache,
        attention_mask=cast("Tensor | None", arguments.get("attention_mask")),
        position_ids=cast("Tensor | None", arguments.get("position_ids")),
        token_ids=cast("Tensor | None", arguments.get("input_ids")),
        last_only=arguments.get("logits_to_keep") == 1 and arguments.get("labels") is None,
        keeps_cache=cache is not None or arguments.get("use_cache") is not False,
    )


def _own_positions(position_ids: Tensor | None, num_rows: int, position: int, num_new: int) -> Tensor | None:
    """The position ids, [num_rows, num_new]; None when they only count on from `position`, as most do."""
    if position_ids is None:
        return None
    counted = torch.arange(position, position + num_new, device=position_ids.device)
    return None if bool((position_ids == counted).all()) else position_ids.expand(num_rows, num_new)


def _left_padding(attention_mask: Tensor | None, num_rows: int, num_tokens: int) -> list[int] | None:
    """How many zeros each row of the mask begins with; None when there are none at all."""
    if attention_mask is None:
        return None
    if attention_mask.shape != (num_rows, num_tokens):
        raise BadInput(
            f"attention_mask is {list(attention_mask.shape)}; it must cover {num_rows} rows and, cached ones included, "
            f"{num_tokens} positions"
        )
    mask = attention_mask.bool()
    if bool(mask.all()):
        return None
    padding = (mask.cumsum(-1) == 0).sum(-1)
    if bool((padding + mask.sum(-1) != num_tokens).any()):
        raise BadInput("attention_mask has zeros after ones; padding must stand at the left of each row")
    return _as_list(padding)
