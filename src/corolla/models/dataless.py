"""Running a model's code on the meta device, where tensors have shapes and no values.

Most of a forward runs there as it is. Where a result's shape or a branch depends on values (the experts that were hit,
positions under a mask), an operation gets the smallest answer with which the code goes on: one row found, true, one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[tuple[Any, ...], dict[str, Any]]


def tensors_in(tree: object) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def operation_name(func: Any) -> str:
    """An ATen operation's name without its overload: `add`, `index_put_`."""
    return func.overloadpacket.__name__


class Dataless(TorchDispatchMode):
    """While this is on, every operation runs on the meta device, wherever its arguments are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = cast("Call", pytree.tree_map_only(Tensor, _without_data, (args, kwargs or {})))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        name = operation_name(func)
        if name in _ANSWERS:
            return _ANSWERS[name](*args)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            args = (args[0], _one_row(args[1]), *args[2:])
        return func(*args, **kwargs)


def _without_data(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def grouped_mm_without_data(left: Tensor, right: Tensor) -> Tensor:
    """Something of the shape that `_grouped_mm` gives: it has no form for every dtype on the meta device."""
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _one_row(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks among an indexing's indices as the numbers of the one row they are taken to select."""
    rows: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            rows.extend([_numbers(1)] * index.ndim)
        else:
            rows.append(index)
    return rows


def _scalar(tensor: Tensor) -> bool | int | float:
    return torch.ones((), dtype=tensor.dtype).item()


def _ones(shape: list[int]) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1


_ANSWERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "_grouped_mm": lambda left, right, *_: grouped_mm_without_data(left, right),
        "_local_scalar_dense": _scalar,
        "is_nonzero": lambda _tensor: True,
        "equal": lambda _left, _right: True,
        "allclose": lambda *_: True,
        "nonzero": lambda tensor: _numbers(1, tensor.ndim),
        "masked_select": lambda tensor, _mask: tensor.new_empty(1),
        "bincount": lambda _tensor, _weights=None, minlength=0: _numbers(max(minlength, 1)),
        "_unique2": lambda tensor, *_: (tensor.new_empty(1), _numbers(*tensor.shape), _numbers(1)),
        "unique_dim": lambda tensor, *_: (tensor, _numbers(tensor.shape[0]), _numbers(tensor.shape[0])),
        "unique_consecutive": lambda tensor, *_: (tensor.new_empty(1), _numbers(*tensor.shape), _numbers(1)),
    }
)

VALUE_DEPENDENT: Final = frozenset(_ANSWERS) - {"_grouped_mm"}
"""Operations whose result, or its shape, cannot be told without values."""


_patching = threading.Lock()


@contextmanager
def lists_without_values() -> Iterator[None]:
    """While this runs, `tolist` of a tensor on the meta device gives ones: no operation that could be answered."""

    def tolist(self: Tensor) -> list[Any]:
        return _ones(list(self.shape)) if self.is_meta else TensorBase.tolist(self)

    with _patching:
        Tensor.tolist = tolist
        try:
            yield
        finally:
            del Tensor.tolist  # what remains is the base class's own
