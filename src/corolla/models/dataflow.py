"""What flows between a family's blocks besides the hidden state, found by watching its forward run without data.

The skeleton carries one thing from span to span: the hidden state that a block gives. A family may use more: token ids
(hash routing), embeddings (per-layer inputs, a shared block fed with them), keys of an earlier block (KV sharing),
a stack of earlier outputs (residual attention). Each of these would come out silently wrong, so they are looked for:
the outline runs once on the meta device, every tensor carries the set of where it came from, and what a block (or the
loop before it) consumes is noted. From that follow the possible cuts, whether servers need token ids, and which of the
modules outside the blocks a server must hold. No family is named here.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from corolla.errors import BadInput
from corolla.models.dataless import Dataless, lists_without_values, operation_name, tensors_in
from corolla.models.skeleton import BlockList, hidden_name

FROM_TOKENS: Final = "token ids"
_PROBE_BATCH, _PROBE_LENGTH = 2, 5


@dataclass(frozen=True, slots=True)
class Output:
    """A source: the hidden state that block `index` gave. The next block gets it over the wire."""

    index: int


@dataclass(frozen=True, slots=True)
class Inside:
    """A source: something made within block `index` and left where others find it (keys, states)."""

    index: int


Source = Output | Inside | str
"""A string names a parameter outside the blocks, or is `FROM_TOKENS`."""

Sources = frozenset[Source]
_NOWHERE: Final[Sources] = frozenset()


@dataclass(frozen=True, slots=True)
class Dataflow:
    """What each block of a family consumed that the block before it did not give."""

    num_blocks: int
    needs_token_ids: bool
    side_parameters: frozenset[str]
    """Parameters outside the blocks that blocks use other than through the hidden state."""
    links: frozenset[tuple[int, int]]
    """`(i, j)`: block `j` uses something of block `i`, so no cut may lie between them."""
    cache_layers: tuple[tuple[int, ...], ...]
    """Which layers of the cache each block uses: its own index for most families."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where a span may begin or end inside the model."""
        return tuple(
            cut for cut in range(1, self.num_blocks) if not any(first < cut <= last for first, last in self.links)
        )


def plain_chain(num_blocks: int) -> Dataflow:
    """Blocks that use nothing but the hidden state of the one before."""
    return Dataflow(
        num_blocks=num_blocks,
        needs_token_ids=False,
        side_parameters=frozenset(),
        links=frozenset(),
        cache_layers=tuple((index,) for index in range(num_blocks)),
    )


def watch_blocks(
    outline: PreTrainedModel, place: BlockList, run: Callable[[Tensor], object], cache: Cache | None
) -> Dataflow:
    """Run `run(token_ids)`, which calls the outline's forward with `cache`, and note what its blocks consume.

    Raises BadInput when the blocks are not run once each and in order, or what follows them uses more than the last
    one's hidden state; NotImplementedError and the like when the family's code cannot run without data.
    """
    watch = _Watch(place.blocks, _outside_parameters(outline, place.blocks))
    token_ids = torch.zeros(_PROBE_BATCH, _PROBE_LENGTH, dtype=torch.int64, device="meta")
    watch.mark(token_ids, frozenset({FROM_TOKENS}))
    with torch.no_grad(), lists_without_values(), watch, _watched_blocks(place, watch), _watched_cache(cache, watch):
        run(token_ids)
    return watch.conclude()


def _outside_parameters(outline: nn.Module, blocks: nn.ModuleList) -> dict[str, Tensor]:
    inside = {id(parameter) for parameter in blocks.parameters()}
    return {name: parameter for name, parameter in outline.named_parameters() if id(parameter) not in inside}


class _Watch(Dataless):
    """Sees every operation: its output comes from where its inputs came from, or from within the running block."""

    def __init__(self, blocks: nn.ModuleList, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.num_blocks = len(blocks)
        self.order: list[int] = []
        self.running: int | None = None
        self.consumed: list[set[Source]] = [set() for _ in blocks]
        self.cache_layers: list[set[int]] = [set() for _ in blocks]
        self.consumed_after: set[Source] = set()
        self._sources: dict[int, Sources] = {}
        self._held: list[Tensor] = []
        for name, parameter in parameters.items():
            self.mark(parameter, frozenset({name}))

    def mark(self, tensor: Tensor, sources: Sources) -> None:
        """Add to a tensor's sources. It is known by its storage, so that views and changes in place count."""
        key = _storage_of(tensor)
        self._sources[key] = self._sources.get(key, _NOWHERE) | sources
        self._held.append(tensor)  # else another could get its storage's address

    def sources_of(self, tensors: Iterable[Tensor]) -> Sources:
        return _NOWHERE.union(*(self._sources.get(_storage_of(tensor), _NOWHERE) for tensor in tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        inputs = tensors_in((args, kwargs))
        sources = _NOWHERE if _asks_only_for_shape(func) else self.sources_of(inputs)
        self._note_use(sources)
        if self.running is not None:
            sources = frozenset({Inside(self.running)})
        views_of = set() if func._schema.is_mutable else {_storage_of(tensor) for tensor in inputs}
        for tensor in tensors_in(output):
            if sources and _storage_of(tensor) not in views_of:
                self.mark(tensor, sources)
        return output

    def _note_use(self, sources: Sources) -> None:
        if self.running is not None:
            self.consumed[self.running] |= sources
        elif len(self.order) == self.num_blocks:
            self.consumed_after |= sources

    def call_block(self, index: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one block on a fresh hidden state, and give a fresh one back."""
        self.order.append(index)
        name = "" if args else hidden_name(kwargs)
        arriving = cast("Tensor", args[0] if args else kwargs[name])
        if index:  # what reaches block 0 is what the client sends
            self.consumed[index] |= self.sources_of([arriving])
        given = self._fresh(arriving, Output(index - 1))
        self.running = index
        try:
            output = block(given, *args[1:], **kwargs) if args else block(**{**kwargs, name: given})
        finally:
            self.running = None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        fresh = self._fresh(cast("Tensor", hidden), Output(index))
        return (fresh, *others) if isinstance(output, tuple) else fresh

    def _fresh(self, like: Tensor, source: Source) -> Tensor:
        tensor = torch.empty_like(like, device="meta")
        self.mark(tensor, frozenset({source}))
        return tensor

    def conclude(self) -> Dataflow:
        if self.order != list(range(self.num_blocks)):
            raise BadInput("its blocks are not run once each, one after the other, so it cannot be cut")
        last = self.num_blocks - 1
        behind = {source for source in self.consumed_after if isinstance(source, Output | Inside)} - {Output(last)}
        if behind:
            raise BadInput("what follows its blocks uses more than the last one's hidden state, so it cannot be cut")
        links = {(first, index) for index, used in enumerate(self.consumed) for first in _earlier_blocks(used, index)}
        outside = frozenset(source for used in self.consumed for source in used if isinstance(source, str))
        return Dataflow(
            num_blocks=self.num_blocks,
            needs_token_ids=FROM_TOKENS in outside,
            side_parameters=outside - {FROM_TOKENS},
            links=frozenset(links),
            cache_layers=tuple(self._own_layers()),
        )

    def _own_layers(self) -> Iterator[tuple[int, ...]]:
        """For each block the layers of the cache that no earlier block uses: some ask the first one for the length."""
        seen: set[int] = set()
        for used in self.cache_layers:
            yield tuple(sorted(used - seen))
            seen |= used


def _earlier_blocks(used: set[Source], index: int) -> Iterator[int]:
    """The blocks that block `index` depends on, but for the hidden state of the one before it."""
    for source in used:
        if isinstance(source, Output) and source.index < index - 1:
            yield source.index + 1  # its output is at hand wherever the next block is
        elif isinstance(source, Inside) and source.index < index:
            yield source.index


@contextmanager
def _watched_blocks(place: BlockList, watch: _Watch) -> Iterator[None]:
    """Calls of the blocks go through `watch`; other uses of them see the blocks themselves."""
    blocks = list(place.blocks)
    for index, block in enumerate(blocks):
        place.blocks[index] = _Watched(block, functools.partial(watch.call_block, index, block))
    try:
        yield
    finally:
        for index, block in enumerate(blocks):
            place.blocks[index] = block


class _Watched(nn.Module):
    """A block that is called through `call`, and answers for its own attributes."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.__dict__["_call"] = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](args, kwargs)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["block"], name)


@contextmanager
def _watched_cache(cache: Cache | None, watch: _Watch) -> Iterator[None]:
    """Notes which of the cache's layers each block turns to."""
    if cache is None:
        yield
        return
    cache.layers = _WatchedLayers(cache.layers, watch)
    try:
        yield
    finally:
        cache.layers = list(cache.layers)


class _WatchedLayers(list[Any]):
    def __init__(self, layers: list[Any], watch: _Watch) -> None:
        super().__init__(layers)
        self.watch = watch

    def __getitem__(self, index: Any) -> Any:
        if self.watch.running is not None and isinstance(index, int):
            self.watch.cache_layers[self.watch.running].add(index)
        return super().__getitem__(index)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage] - meta storages have no address


def _asks_only_for_shape(func: Any) -> bool:
    """Whether an operation makes a tensor that only looks like its input."""
    name = operation_name(func)
    return name.startswith("new_") or name.endswith("_like")
