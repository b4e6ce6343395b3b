"""A process that runs a decoder, kept small: what it never uses is not imported, and what it freed it gives back.

Measured for a client of SmolLM2 (Linux, resident): 36 MB are scipy.optimize, 30 MB freed memory that the allocator
keeps after imports and loading. What is left besides the tensors is torch's and transformers' own.
"""

import ctypes
import gc
import importlib
import sys
from types import ModuleType
from typing import Any, Final, cast

_MODELS: Final = "transformers.modeling_utils"
_LOSSES: Final = "transformers.loss."
_FROM_SCIPY: Final = "linear_sum_assignment"


def import_modeling() -> None:
    """Import transformers' models, without the scipy that its losses for object detection would bring along.

    transformers does without where scipy is not installed, but hivemind asks for it. So transformers is told that it
    is not there, for the time of this import; those losses then find it when they are called.
    """
    utils = cast("Any", importlib.import_module("transformers.utils"))
    is_available = getattr(utils, "is_scipy_available", None)
    if is_available is None or "scipy.optimize" in sys.modules or _MODELS in sys.modules:
        importlib.import_module(_MODELS)
        return
    utils.is_scipy_available = _says_no
    try:
        importlib.import_module(_MODELS)
    finally:
        utils.is_scipy_available = is_available
        for name, module in list(sys.modules.items()):
            if name.startswith(_LOSSES) and vars(module).get("is_scipy_available") is _says_no:
                _give_scipy_back(module, is_available)


def _says_no() -> bool:
    return False


def _give_scipy_back(module: ModuleType, is_available: object) -> None:
    vars(module)["is_scipy_available"] = is_available
    vars(module).setdefault(_FROM_SCIPY, _linear_sum_assignment)


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    """scipy's own, imported when it is first called."""
    return getattr(importlib.import_module("scipy.optimize"), _FROM_SCIPY)(*args, **kwargs)


def give_back_freed() -> None:
    """Return memory that was freed to the system, where the allocator (glibc's) would keep it; takes milliseconds."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
