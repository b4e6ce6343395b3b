"""torch's compiler, imported when something compiles and not because something names it.

transformers' models decorate with it, and torch itself tells it what to leave alone whenever a model is run without
data. A server or client compiles nothing, yet of the seven seconds of its imports two were the compiler's, and 70 MB of
its memory (with sympy). So a stand-in takes what is said to the compiler, until something wants more: then the real one
is imported, is told, and takes its place.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_VMAP: Final = "torch._dynamo._trace_wrapped_higher_order_op"


def put_off_compiler() -> None:
    """From here on the compiler is imported when it is needed. Nothing happens where it is there already."""
    if _COMPILER not in sys.modules:
        stand_in = _StandIn()
        sys.modules[_COMPILER] = stand_in
        sys.meta_path.insert(0, _Parts(stand_in))


class _StandIn(ModuleType):
    """What can be said to the compiler before it is there; whatever else is asked of it is the real one's."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__spec__ = ModuleSpec(_COMPILER, None, is_package=True)
        self.__path__ = []
        self._to_allow: list[Callable[..., Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> Any:
        """The compiler, imported if it was not."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Parts)]
            sys.modules.pop(_VMAP, None)
            for function in self._to_allow:
                importlib.import_module(_COMPILER).allow_in_graph(function)
        return importlib.import_module(_COMPILER)

    def assume_constant_result(self, function: Any) -> Any:
        function._dynamo_marked_constant = True  # all that the real one does
        return function

    def allow_in_graph(self, function: Any) -> Any:
        self._to_allow.append(function)
        return function

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return partial(self.disable, recursive=recursive, **options)
        disabled: Any = None

        @wraps(function)
        def not_compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if sys.modules.get(_COMPILER) is self:  # then nothing is being compiled
                return function(*args, **kwargs)
            if disabled is None:
                disabled = self.real().disable(function, recursive, **options)
            return disabled(*args, **kwargs)

        return not_compiled


class _Parts(MetaPathFinder):
    """Answers imports of the compiler's modules: with the real ones, but for the one that transformers names."""

    def __init__(self, compiler: _StandIn) -> None:
        self._compiler = compiler

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_COMPILER + "."):
            return None
        if fullname == _VMAP:
            module = ModuleType(_VMAP)
            vars(module)["TransformGetItemToIndex"] = self._item_to_index
        else:
            self._compiler.real()
            module = importlib.import_module(fullname)
        return ModuleSpec(fullname, _Given(module))

    def _item_to_index(self) -> Any:
        self._compiler.real()
        return importlib.import_module(_VMAP).TransformGetItemToIndex()


class _Given(Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if self._spec is not None:
            module.__spec__ = self._spec
