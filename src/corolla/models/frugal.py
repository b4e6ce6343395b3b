"""A process that runs a decoder, kept small: what it never uses is not imported, and what it freed it gives back.

Measured for a client of SmolLM2 (Linux, resident): 36 MB are scipy.optimize, 30 MB freed memory that the allocator
keeps after imports and loading, 70 MB pages of libraries that only their start touched. What is left besides the
tensors is torch's and transformers' own.
"""

import ctypes
import gc
import importlib
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from corolla.models.compiler import put_off_compiler

_MODELS: Final = "transformers.modeling_utils"
_LOSSES: Final = "transformers.loss."
_QUESTIONS: Final = ("transformers.utils.import_utils", "transformers.utils")
_ABOUT_SCIPY: Final = "is_scipy_available"
_FROM_SCIPY: Final = "linear_sum_assignment"

_LIBRARY_CODE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-.p \S+ \S+ \d+ +/.*\.so[.\d]*$")
"""A mapping of a library's file that cannot be written to, in Linux's /proc/self/smaps."""
_LEAST_KB: Final = 256
"""Of a library in memory, to be worth a call."""


def import_modeling() -> None:
    """Import transformers' models, without what they bring along for others: compiling, sharding, detecting objects.

    transformers does without scipy, and without a torch that has no `torch.distributed`, where those are not there. So
    for the time of this import it is told that they are not. Whoever shards models with transformers beside corolla
    has them: as in a process that torchrun started, or one that imported `transformers.modeling_utils` before.
    """
    if _MODELS in sys.modules:
        return
    absent: list[str] = []
    if "scipy.optimize" not in sys.modules:
        absent.append(_ABOUT_SCIPY)
    if not _may_shard():
        absent.append("is_torch_distributed_available")
    put_off_compiler()
    with _told_absent(absent):
        importlib.import_module(_MODELS)


def _may_shard() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ or "torch.distributed.tensor" in sys.modules


@contextmanager
def _told_absent(questions: Sequence[str]) -> Iterator[None]:
    """transformers' own questions after libraries, answered with no; those after scipy only until the block ends."""
    asked = [
        (module, name, getattr(module, name))
        for module in map(importlib.import_module, _QUESTIONS)
        for name in questions
        if hasattr(module, name)
    ]
    for module, name, _ in asked:
        setattr(module, name, _says_no)
    try:
        yield
    finally:
        for module, name, answer in asked:
            setattr(module, name, answer)
            if name == _ABOUT_SCIPY:
                _give_scipy_back(answer)


def _says_no() -> bool:
    return False


def _give_scipy_back(is_available: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_LOSSES) and vars(module).get(_ABOUT_SCIPY) is _says_no:
            vars(module)[_ABOUT_SCIPY] = is_available
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


def give_back_library_pages() -> None:
    """Unmap the code of libraries that is in memory; what is called again comes back from the system's file cache.

    Importing torch runs through most of its code, registering operators, and a decoder's client uses a third of it
    afterwards. Nothing can be lost: pages are taken that are equal to the library's file, none that was written to.
    Takes some 20 ms, and as much again to get the pages back. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _resident_code(Path("/proc/self/smaps")):
        advise(start, end - start, mmap.MADV_DONTNEED)  # an error (pages locked in memory) leaves all as it was


def _resident_code(smaps: Path) -> Iterator[tuple[int, int]]:
    """Where code of libraries lies, as their files have it, of which enough is in memory."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:  # a sandbox without /proc
        return
    mapping: re.Match[str] | None = None
    resident_kb = 0
    for line in lines:
        if line[0].isdigit() or line[0] in "abcdef":
            mapping = _LIBRARY_CODE.match(line)
        elif mapping is not None and line.startswith("Rss:"):
            resident_kb = int(line.split()[1])
        elif mapping is not None and line.startswith("Anonymous:"):
            written_kb = int(line.split()[1])
            if written_kb == 0 and resident_kb >= _LEAST_KB:
                yield int(mapping[1], 16), int(mapping[2], 16)
