"""One decode step of a span, run without data and written down operation by operation, for a tape (`tape.py`).

The family's forward runs on the meta device, so nothing is computed and no weight is read. How many positions the cache
holds is a symbol without a value: code that branches on it, as on any value, cannot go on, and there is no recording.
So what was recorded is what the forward does at every position.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from corolla.models.cache import GrowingLayer
from corolla.models.dataless import VALUE_DEPENDENT, grouped_mm_without_data, operation_name, tensors_in

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

MIN_TOKENS: Final = 2
"""What is known of the number of positions: torch takes lengths of 0 and 1 apart in ways that do not show."""

_META: Final = torch.device("meta")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CannotRecord(BaseException):
    """This forward is not the same at every position, or does more than compute; no `except Exception` stops it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: `output = function(*args, **kwargs)`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class Update:
    """A layer of the cache took in the new position: `keys, values` become `all_keys, all_values`."""

    layer: int
    keys: Tensor
    values: Tensor
    output: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class BlockDone:
    """Block `index` has given its hidden state."""

    index: int
    hidden: Tensor


@dataclass(slots=True)
class Recording:
    """A decode step of one row: its inputs, without data, and what was done with them, in order."""

    hidden: Tensor
    """As the blocks take it."""
    position_ids: Tensor
    """int64 [1, 1]."""
    num_tokens: int
    """Positions that the cache held before: a symbol (torch.SymInt)."""
    events: list[Call | Update | BlockDone] = field(default_factory=list["Call | Update | BlockDone"])


Run = Callable[[Tensor, Tensor, "RecordedLayers"], object]
"""`run(hidden, position_ids, layers)`: one decode step of the family's forward, over a cache of these layers."""


def symbols() -> "ShapeEnv":
    """Where numbers without a value come from. Seconds, the first time: sympy is imported, and torch's compiler."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(allow_scalar_outputs=False)


def record(model: nn.Module, blocks: Mapping[int, nn.Module], hidden: Tensor, run: Run) -> Recording:
    """What `run` does for a hidden state like `hidden`. `model`, of which `blocks` are parts, is left as it was.

    Raises CannotRecord, or whatever the family's code raises without data.
    """
    num_tokens = cast("int", symbols().create_unbacked_symint())
    torch._check(num_tokens >= MIN_TOKENS)  # pyright: ignore[reportPrivateUsage] - torch's own word for what is known of a symbol
    position_ids = torch.empty(1, 1, dtype=torch.int64, device=_META)
    recording = Recording(torch.empty_like(hidden, device=_META), position_ids, num_tokens)
    with _left_alone(model), _noted_blocks(blocks, recording), _WithoutValues(), _Recorder(recording, hidden.device):
        run(recording.hidden, position_ids, RecordedLayers(recording, num_tokens))
    return recording


class RecordedLayers:
    """The cache's layers while a step is recorded; `num_tokens`: how many positions they hold, a symbol."""

    def __init__(self, recording: Recording, num_tokens: int) -> None:
        self.recording = recording
        self.num_tokens = num_tokens

    def layer(self, index: int) -> GrowingLayer:
        """What stands for the cache's layer `index`."""
        return _RecordedLayer(self, index)


class _RecordedLayer(GrowingLayer):
    def __init__(self, layers: RecordedLayers, index: int) -> None:
        super().__init__()
        self.recording = layers.recording
        self.index = index
        self.num_tokens = layers.num_tokens
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.num_tokens += key_states.shape[-2]
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] - no operation of the forward's
            output = (_as_long(key_states, self.num_tokens), _as_long(value_states, self.num_tokens))
        self.recording.events.append(Update(self.index, key_states, value_states, output))
        return output


def _as_long(states: Tensor, num_tokens: int) -> Tensor:
    return states.new_empty((*states.shape[:-2], num_tokens, states.shape[-1]))


class _Recorder(TorchFunctionMode):
    """Notes every function of torch's that gives or changes a tensor."""

    def __init__(self, recording: Recording, device: torch.device) -> None:
        super().__init__()
        self.events = recording.events
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:  # has no form for a length that is a symbol
            output = _attended(*args, **kwargs)
        else:
            on_meta, named_on_meta = cast(
                "_Arguments", pytree.tree_map_only(torch.device, lambda _: _META, (args, kwargs))
            )
            output = func(*on_meta, **named_on_meta)
        if isinstance(output, torch.device):
            return self.device  # code asks where it runs, and takes other ways on other devices
        if tensors_in(output) or (output is None and tensors_in((args, kwargs))):
            self.events.append(Call(func, args, kwargs, output))
        elif "autocast" in getattr(func, "__name__", ""):
            raise CannotRecord("it changes what later operations compute in")
        return output


class _WithoutValues(TorchDispatchMode):
    """Runs every operation on the meta device; what needs a value or changes a weight cannot be run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if name in VALUE_DEPENDENT or (name.startswith("index") and _selects_by_mask(args[1])):
            raise CannotRecord(f"{name} depends on values")
        if func._schema.is_mutable and any(not tensor.is_meta for tensor in _changed(func, args, kwargs)):
            raise CannotRecord(f"{name} changes a tensor of the model's own")
        args, kwargs = cast("_Arguments", pytree.tree_map_only(Tensor, _without_data, (args, kwargs)))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        if name == "_grouped_mm":
            return grouped_mm_without_data(args[0], args[1])
        return func(*args, **kwargs)


def _attended(query: Tensor, _key: Tensor, value: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _without_data(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(_META)


def _selects_by_mask(indices: object) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    written = [
        kwargs.get(argument.name) if argument.kwarg_only else args[place] if place < len(args) else None
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(written)


@contextmanager
def _noted_blocks(blocks: Mapping[int, nn.Module], recording: Recording) -> Iterator[None]:
    def note(index: int) -> Callable[..., None]:
        def done(_block: nn.Module, _args: object, output: Any) -> None:
            recording.events.append(BlockDone(index, output[0] if isinstance(output, tuple) else output))

        return done

    hooks = [block.register_forward_hook(note(index)) for index, block in blocks.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the attributes it had. Raises CannotRecord when the forward had changed one."""
    before = [(module, [(names, dict(names)) for names in _names_of(module)]) for module in model.modules()]
    changed = ""
    try:
        yield
    finally:
        for module, all_names in before:
            for now, then in all_names:
                if now.keys() != then.keys() or any(now[name] is not then[name] for name in then):
                    changed = type(module).__name__
                    now.clear()
                    now.update(then)
    if changed:
        raise CannotRecord(f"{changed} changes itself")


def _names_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._buffers, module._parameters  # pyright: ignore[reportPrivateUsage] - as they are kept
