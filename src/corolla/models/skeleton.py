"""The family's own model with other people's blocks cut out of it.

A transformers decoder computes positions, masks and rotary tables, then loops over its block list. Here that
forward runs unchanged, with a full-length block list in which blocks that are not hosted pass their input on. So one
code serves every family: the hidden state is put in where the block before the first hosted one would give it
(`Given`; before block 0: `Entry`), so that whatever the loop does between two blocks is done, and the forward is left
after the last (`Exit`); the client's half puts the swarm in the place of the blocks (`local_half.py`). Measured on 105
families against calling the blocks directly and against a sliced config: only this one is right, bitwise, for all.

`prune` works on a model whose weights are not loaded yet (meta device); `SkeletonBlocks` is installed after loading.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from corolla.errors import BadInput

CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "cache_params")
"""Under which names forwards take their cache: the first since transformers 5.24, which still hears the second."""

_STAND_INS: Final = "_corolla_stand_ins"
_OTHER_COUNTS: Final = ("num_layers", "n_layer", "n_layers", "decoder_layers")


@dataclass(frozen=True, slots=True)
class BlockList:
    """Where a family keeps its blocks: `owner.attribute`."""

    owner: nn.Module
    attribute: str
    blocks: nn.ModuleList
    runner: nn.Module
    """Whose forward takes embeddings and a cache and runs the blocks: `owner`, or what stands around it."""

    def replace(self, blocks: nn.ModuleList) -> None:
        setattr(self.owner, self.attribute, blocks)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's part of a config: itself, or the text part of one that also sees or hears."""
    return config.get_text_config(decoder=True)


def block_counts(config: PreTrainedConfig) -> list[int]:
    """How long the block list may be, likeliest first: some families count two cache layers for each block."""
    config = text_config(config)
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", *_OTHER_COUNTS)]
    return list(dict.fromkeys(count for count in counts if isinstance(count, int)))


def find_blocks(model: PreTrainedModel) -> BlockList:
    """The decoder's block list: the outermost list of as many modules as the config has blocks, the largest of equals.

    Raises BadInput when there is none, or nothing around it that could be run over embeddings.
    """
    decoder = cast("nn.Module", model.get_decoder())
    for root in (decoder, model):  # a model that also sees has as long a list elsewhere, perhaps
        for num_blocks in block_counts(model.config):
            found = _list_of(root, num_blocks)
            if found is not None:
                return _with_runner(model, *found)
    raise BadInput(
        f"{model.config.model_type}: its {block_counts(model.config)[0]} blocks are not one plain list, "
        "so it cannot be cut"
    )


def _list_of(root: nn.Module, num_blocks: int) -> tuple[nn.Module, str] | None:
    """Whose attribute of which name is a list of `num_blocks` modules."""
    best: tuple[tuple[int, int], nn.Module, str] | None = None
    for path, module in root.named_modules():
        for name, child in module.named_children():
            if not isinstance(child, nn.ModuleList) or len(child) != num_blocks:
                continue
            order = (path.count("."), -sum(parameter.numel() for parameter in child.parameters()))
            if best is None or order < best[0]:
                best = (order, module, name)
    return None if best is None else best[1:]


def _with_runner(model: PreTrainedModel, owner: nn.Module, attribute: str) -> BlockList:
    blocks = cast("nn.ModuleList", getattr(owner, attribute))
    path = next(path for path, module in model.named_modules() if module is owner)
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):  # innermost first
        module = model.get_submodule(".".join(parts[:length]))
        parameters = inspect.signature(type(module).forward).parameters
        if "inputs_embeds" in parameters and any(name in parameters for name in CACHE_ARGUMENTS):
            return BlockList(owner, attribute, blocks, module)
    raise BadInput(
        f"{model.config.model_type}: nothing runs its blocks over embeddings with a cache given from outside, "
        "so it cannot be cut"
    )


class StandIn(nn.Module):
    """Stands where another module stood, and still answers for its plain attributes (`layer.attention_type`, …)."""

    def __init__(self, donor: nn.Module) -> None:
        super().__init__()
        self.__dict__["_donor"] = donor  # not registered: its weights are never loaded, listed or moved

    @property
    def donor(self) -> nn.Module:
        return self.__dict__["_donor"]

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        return modules[name] if name in modules else getattr(self.__dict__["_donor"], name)


class PassThrough(StandIn):
    """Stands for a block that is not hosted: gives its input back, in as many parts as the block would."""

    def __init__(self, donor: nn.Module, num_outputs: int | None) -> None:
        super().__init__(donor)
        self.num_outputs = num_outputs

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Straight here, past nn.Module's hooks: a span late in a deep model passes dozens of these each step.
        hidden = args[0] if args else hidden_argument(kwargs)
        return hidden if self.num_outputs is None else (hidden,) + (None,) * (self.num_outputs - 1)


class Given(StandIn):
    """Stands for the block before the first hosted one: gives `hidden`, as that block did elsewhere."""

    hidden: Tensor | None = None

    def __init__(self, donor: nn.Module, num_outputs: int | None) -> None:
        super().__init__(donor)
        self.num_outputs = num_outputs

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        return self.hidden if self.num_outputs is None else (self.hidden,) + (None,) * (self.num_outputs - 1)


class StubEmbedding(StandIn):
    """Stands for an embedding table that a server does not hold. What it gives is replaced at the first block."""

    def __init__(self, donor: nn.Module, *, is_for_tokens: bool) -> None:
        super().__init__(donor)
        self.is_for_tokens = is_for_tokens

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        indices = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        # Others get whatever their family makes positions of; one position of one row broadcasts with any batch.
        shape = indices.shape if self.is_for_tokens else (1, 1)
        return torch.zeros(*shape, self.embedding_dim, dtype=self.weight.dtype, device=indices.device)


class StubModule(StandIn):
    """Stands for a norm, projection or head that a server does not hold: gives its input back, as wide as due."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        given = next(tensor for tensor in tensors if tensor.is_floating_point())
        size = getattr(self, "out_features", given.shape[-1])
        return given if size == given.shape[-1] else given.new_zeros(*given.shape[:-1], size)


class SpanDone(BaseException):
    """Leaves the family's forward after the last hosted block; no `except Exception` of the family stops it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Around(nn.Module):
    """A block with something before or after it; answers for the block's own attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["block"], name)


class Entry(_Around):
    """Block 0: computes on `hidden`, which the client sent, instead of what the forward brings."""

    hidden: Tensor | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if args:
            return self.block(self.hidden, *args[1:], **kwargs)
        return self.block(**{**kwargs, hidden_name(kwargs): self.hidden})


class Exit(_Around):
    """The last hosted block: nothing after it runs."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        output = self.block(*args, **kwargs)
        raise SpanDone(output[0] if isinstance(output, tuple) else output)


class SkeletonBlocks(nn.ModuleList):
    """A block list whose slices are plain lists: nn.ModuleList builds and registers a new module for each."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.__dict__["_plain"] = list(blocks)

    def __getitem__(self, idx: Any) -> Any:
        return self.__dict__["_plain"][idx]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_plain"])


def hidden_name(kwargs: dict[str, object]) -> str:
    """Under which name a block got its hidden state, where that was not the first positional argument."""
    return "hidden_states" if "hidden_states" in kwargs else "x"


def hidden_argument(kwargs: dict[str, object]) -> object:
    return kwargs[hidden_name(kwargs)]


def prune(
    model: PreTrainedModel, start: int, end: int, *, keep_ends: bool, needed: frozenset[str] = frozenset()
) -> None:
    """Take out every block outside `[start, end)`, and unless `keep_ends` what stands before and after the blocks.

    `needed` names the parameters out there that blocks use, which stay.
    """
    place = find_blocks(model)
    left = [
        block if start <= index < end else PassThrough(block, count_outputs(block))
        for index, block in enumerate(place.blocks)
    ]
    place.replace(nn.ModuleList(left))
    if not keep_ends:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        used = {identity for identity, name in names.items() if name in needed}
        kept = cast("nn.ModuleList", getattr(place.owner, place.attribute))
        _stub_outside(model, kept, used, model.get_input_embeddings())
    _keep_ties(model)


def _keep_ties(model: PreTrainedModel) -> None:
    """Leave the ties among tensors that are left; where the one they are tied to was pruned, the first stands in."""
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stand_ins: dict[str, str] = {}
    ties: dict[str, str] = {}
    for tensor, source in model.all_tied_weights_keys.items():
        if tensor in present:
            kept = source if source in present else stand_ins.setdefault(source, tensor)
            if kept != tensor:
                ties[tensor] = kept
    model.all_tied_weights_keys = ties
    model.__dict__[_STAND_INS] = stand_ins


def stand_ins_for_pruned(model: PreTrainedModel) -> dict[str, str]:
    """Of a pruned model: tensors that were pruned and are stored for others that are tied to them, and the first."""
    return cast("dict[str, str]", model.__dict__[_STAND_INS])


def _stub_outside(module: nn.Module, blocks: nn.ModuleList, used: set[int], tokens: nn.Module) -> None:
    """Replace the largest parts that have weights, none of them used, and neither contain the blocks nor are they."""
    for name, child in list(module.named_children()):
        parameters = {id(parameter) for parameter in child.parameters()}
        if child is blocks or not parameters:
            continue
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)  # the family's forward goes through its items
        if is_container or any(part is blocks for part in child.modules()) or not parameters.isdisjoint(used):
            _stub_outside(child, blocks, used, tokens)
        else:
            setattr(module, name, _stub_for(child, tokens))


def _stub_for(module: nn.Module, tokens: nn.Module) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return StubEmbedding(module, is_for_tokens=module is tokens)
    return StubModule(module)


def count_outputs(block: nn.Module) -> int | None:
    """How many values the block returns as a tuple; None: a bare tensor. Read from the source of its forward."""
    return _outputs_of(type(block))


@functools.cache
def _outputs_of(kind: type[nn.Module]) -> int | None:
    function = inspect.unwrap(kind.forward)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)][-1]
    if isinstance(returned, ast.Name):  # `return outputs`, after `outputs = (hidden, weights)`
        lengths = [_tuple_length(value) for value in _values_given_to(returned.id, tree)]
        return next((length for length in lengths if length), None)
    return _tuple_length(returned) or None


def _values_given_to(name: str, tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            yield node.value


def _tuple_length(value: ast.expr | None) -> int:
    """How many values a tuple surely has; 0 when it is none. `(hidden,) + others` has one."""
    if isinstance(value, ast.Tuple):
        return len(value.elts)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _tuple_length(value.left) + _tuple_length(value.right)
    return 0
