"""The family's own model with other people's blocks cut out of it.

A transformers decoder computes positions, masks and rotary tables, then loops over its block list. Here that
forward runs unchanged, with a full-length block list in which blocks that are not hosted pass their input on. So one
code serves every family: the hidden state is put in at the first hosted block (`Entry`) and the forward is left after
the last (`Exit`); the client's half puts the swarm in the place of block 0 (`local_half.py`). Measured on 105 families
against calling the blocks directly and against a sliced config: only this one is right, bitwise, for all.

`prune` works on a model whose weights are not loaded yet (meta device); `SkeletonBlocks` is installed after loading.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from corolla.errors import BadInput


@dataclass(frozen=True, slots=True)
class BlockList:
    """Where a family keeps its blocks: `owner.attribute`; `owner`'s forward is the loop over them."""

    owner: nn.Module
    attribute: str
    blocks: nn.ModuleList

    def replace(self, blocks: nn.ModuleList) -> None:
        setattr(self.owner, self.attribute, blocks)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's part of a config: itself, or the text part of one that also sees or hears."""
    return config.get_text_config(decoder=True)


def block_count(config: PreTrainedConfig) -> int:
    return int(text_config(config).num_hidden_layers)


def find_blocks(model: PreTrainedModel) -> BlockList:
    """The model's block list: the outermost list of as many modules as the config has blocks, the largest of equals.

    Raises BadInput when there is none.
    """
    num_blocks = block_count(model.config)
    best: tuple[tuple[int, int], BlockList] | None = None
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if not isinstance(child, nn.ModuleList) or len(child) != num_blocks:
                continue
            order = (path.count("."), -sum(parameter.numel() for parameter in child.parameters()))
            if best is None or order < best[0]:
                best = (order, BlockList(module, name, child))
    if best is None:
        raise BadInput(
            f"{model.config.model_type}: its {num_blocks} blocks are not one plain list, so it cannot be cut"
        )
    return best[1]


class _StandIn(nn.Module):
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


class PassThrough(_StandIn):
    """Stands for a block that is not hosted: gives its input back, in as many parts as the block would."""

    def __init__(self, donor: nn.Module, num_outputs: int | None) -> None:
        super().__init__(donor)
        self.num_outputs = num_outputs

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Straight here, past nn.Module's hooks: a span late in a deep model passes dozens of these each step.
        hidden = args[0] if args else hidden_argument(kwargs)
        return hidden if self.num_outputs is None else (hidden,) + (None,) * (self.num_outputs - 1)


class StubEmbedding(_StandIn):
    """Stands for an embedding table that a server does not hold. What it gives is replaced at the first block."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        # One position of one row: broadcasts with any batch and length.
        return torch.zeros(1, 1, self.embedding_dim, dtype=self.weight.dtype, device=device)


class StubModule(_StandIn):
    """Stands for a norm, projection or head that a server does not hold."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if args else next(iter(kwargs.values()))


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
    """The first hosted block: computes on `incoming` instead of what the forward brings."""

    incoming: Tensor | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if args:
            return self.block(self.incoming, *args[1:], **kwargs)
        return self.block(**{**kwargs, hidden_name(kwargs): self.incoming})


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


def prune(model: PreTrainedModel, start: int, end: int, *, keep_ends: bool) -> None:
    """Take out every block outside `[start, end)`, and unless `keep_ends` what stands before and after the blocks."""
    place = find_blocks(model)
    num_outputs = count_outputs(place.blocks[0])
    kept = [
        block if start <= index < end else PassThrough(block, num_outputs) for index, block in enumerate(place.blocks)
    ]
    place.replace(nn.ModuleList(kept))
    if not keep_ends:
        _stub_outside(model, cast("nn.ModuleList", getattr(place.owner, place.attribute)))
        model.all_tied_weights_keys = {}


def _stub_outside(module: nn.Module, blocks: nn.ModuleList) -> None:
    """Replace the largest parts that have weights and neither contain the blocks nor are they."""
    for name, child in list(module.named_children()):
        if child is blocks:
            continue
        if any(part is blocks for part in child.modules()):
            _stub_outside(child, blocks)
        elif any(True for _ in child.parameters()):
            setattr(module, name, StubEmbedding(child) if isinstance(child, nn.Embedding) else StubModule(child))


def count_outputs(block: nn.Module) -> int | None:
    """How many values the block returns as a tuple; None: a bare tensor. Read from the source of its forward."""
    function = inspect.unwrap(type(block).forward)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)][-1]
    if isinstance(returned, ast.Name):  # `return outputs`, after `outputs = (hidden, weights)`
        returned = _assigned_tuple(tree, returned.id)
    return len(returned.elts) if isinstance(returned, ast.Tuple) else None


def _assigned_tuple(tree: ast.AST, name: str) -> ast.Tuple | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if name in names:
                return node.value
    return None
