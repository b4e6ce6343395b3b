"""A decode step as a straight list of operations, in the place of the family's forward.

For a small block half of a step of one token is Python: the forward around the blocks, calls of modules, checks. A tape
is what is left of it: the operations in order, each on the results of earlier ones (`recording.py` finds them).
It is used only after it gave the very bits of the forward at several lengths. Where a family cannot be recorded, or for
several rows, padding or another kind of cache, the forward runs as ever.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from corolla.models.dataless import tensors_in
from corolla.models.recording import BlockDone, Call, CannotRecord, Recording, Update

Play = Callable[[Tensor, Tensor, list[Any], int], Tensor]
"""`play(hidden, position_ids, layers, num_tokens)`: the hidden state after the last block, as blocks give it. `layers`
are the cache's, which hold `num_tokens` positions and take in one more."""

_IDLE: Final = frozenset({"_set_grad_enabled"})
"""Functions that a step without gradients can leave out."""
_CONVERSIONS: Final = frozenset({"to", "float", "type_as"})
"""Functions that do nothing where they give their input back: it had that dtype and device already."""


def write_tape(recording: Recording, *, after: int | None, last: int, device: torch.device) -> Play:
    """The part of a recorded step that follows block `after` (None: all of it), up to block `last`.

    Raises CannotRecord when that part needs more than the hidden state from what is left out.
    """
    return _Writer(recording, device).write(after, last)


class _Missing(Exception):
    """An operand comes from a part of the step that is left out."""


class _Writer:
    def __init__(self, recording: Recording, device: torch.device) -> None:
        self._events = recording.events
        self._device = device
        self._graph = Graph()
        names = ("hidden", "position_ids", "layers", "num_tokens", "constants")
        self._hidden, position_ids, self._layers, self._num_tokens, self._constants_in = map(
            self._graph.placeholder, names
        )
        self._symbol = recording.num_tokens.node.expr  # pyright: ignore[reportAttributeAccessIssue] - an int by its looks
        self._nodes = {id(recording.hidden): self._hidden, id(recording.position_ids): position_ids}
        self._constants: list[Tensor] = []
        self._kept: set[Node] = set()
        """What changes a tensor or the cache: needed even where nothing uses what it gives."""

    def write(self, after: int | None, last: int) -> Play:
        is_left_out = after is not None
        if is_left_out:
            self._nodes = {key: node for key, node in self._nodes.items() if node is not self._hidden}
        for event in self._events:
            if isinstance(event, BlockDone):
                if event.index == after:
                    self._nodes[id(event.hidden)] = self._hidden
                    is_left_out = False
                elif event.index == last:
                    return self._finish(event.hidden)
                continue
            try:
                self._update(event) if isinstance(event, Update) else self._call(event)
            except _Missing:
                if not is_left_out:
                    raise CannotRecord("a part of the span uses more than the hidden state") from None
        raise CannotRecord(f"block {last} was not run")

    def _finish(self, output: Tensor) -> Play:
        self._graph.output(self._operand(output))
        self._graph.eliminate_dead_code(lambda node: node in self._kept or node.op in ("placeholder", "output"))
        return partial(GraphModule(nn.Module(), self._graph).forward, constants=self._constants)

    def _update(self, event: Update) -> None:
        states = (self._operand(event.keys), self._operand(event.values))
        layer = self._graph.call_function(operator.getitem, (self._layers, event.layer))
        self._keep(self._graph.call_method("update", (layer, *states)), event.output)

    def _call(self, call: Call) -> None:
        name = getattr(call.function, "__name__", "")
        if name in _IDLE or (name in _CONVERSIONS and call.output is call.args[0] and self._stays(call)):
            return
        args, kwargs = self._operands(call.args), self._operands(call.kwargs)
        node = self._node(call.function, name, args, kwargs)
        if _changes(name, call):
            self._keep(node, call.output)
        else:
            self._name(node, call.output)

    def _stays(self, call: Call) -> bool:
        devices = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.device)]
        return all(device == self._device for device in devices)

    def _node(self, function: Any, name: str, args: Any, kwargs: Any) -> Node:
        if name == "__get__":  # an attribute: `tensor.T`
            return self._graph.call_function(getattr, (args[0], function.__self__.__name__))
        if getattr(torch._C.TensorBase, name, None) is not function:  # pyright: ignore[reportPrivateUsage]
            return self._graph.call_function(function, args, kwargs)
        if name.startswith("__") and hasattr(operator, name):
            return self._graph.call_function(getattr(operator, name), args, kwargs)
        return self._graph.call_method(name, args, kwargs)

    def _keep(self, node: Node, output: object) -> None:
        self._kept.add(node)
        self._name(node, output)

    def _name(self, node: Node, output: object) -> None:
        """Let later operations find `output`, a tensor or several, as what `node` gives."""
        if isinstance(output, tuple | list):
            for place, part in enumerate(cast("list[object]", output)):
                self._name(self._graph.call_function(operator.getitem, (node, place)), part)
        elif isinstance(output, Tensor):
            self._nodes[id(output)] = node

    def _operands(self, values: Any) -> Any:
        return map_aggregate(values, self._operand)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._nodes[id(value)] if id(value) in self._nodes else self._constant(value)
        if isinstance(value, torch.SymInt):
            return self._length(value)
        return value

    def _constant(self, tensor: Tensor) -> Node:
        if tensor.is_meta:
            raise _Missing
        node = self._graph.call_function(operator.getitem, (self._constants_in, len(self._constants)))
        self._constants.append(tensor)
        self._nodes[id(tensor)] = node
        return node

    def _length(self, value: torch.SymInt) -> Node:
        more = value.node.expr - self._symbol
        if not more.is_Integer:
            raise CannotRecord(f"it needs {value.node.expr} of the number of positions")
        return self._graph.call_function(operator.add, (self._num_tokens, int(more)))


def _changes(name: str, call: Call) -> bool:
    """Whether an operation writes to a tensor that it was given."""
    is_augmented = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return call.output is None or is_augmented or is_in_place or bool(tensors_in(call.kwargs.get("out")))
