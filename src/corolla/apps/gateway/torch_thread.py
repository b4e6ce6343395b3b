"""The one thread in which a gateway does its torch work, and where answers that come together share a pass of the head.

The head reads all its weights for every pass (a gigabyte, for a vocabulary of 128k), however many rows there are: one
pass for all that has arrived while the last one ran costs hardly more than one for a single answer. A lone answer is
computed alone, bit for bit as the local model does it; in company rounding may differ as it does on the servers.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import Tensor

from corolla.apps.gateway.half import Stride
from corolla.apps.gateway.writing import Next, Writing

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ROWS: Final = 64
"""Of one pass: bounds the memory of its logits, and how long the first of them waits for the last."""


@dataclass(slots=True)
class _Advance:
    """An answer whose blocks have been computed."""

    writing: Writing
    stride: Stride
    output: Tensor
    done: "asyncio.Future[Any]"

    @property
    def rows(self) -> int:
        return self.stride.token_ids.shape[0]


@dataclass(slots=True)
class _Call:
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class TorchThread:
    """Works for one event loop until closed."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Advance | _Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gateway-torch", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done there. Its caller may be gone by then; it is done all the same."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put(_Call(work, done))
        return await done

    async def go_on(self, writing: Writing, stride: Stride, output: Tensor) -> Next:
        """`writing.go_on`, its logits perhaps computed together with others'."""
        done: asyncio.Future[Next] = asyncio.get_running_loop().create_future()
        self._inbox.put(_Advance(writing, stride, output, done))
        return await done

    def close(self) -> None:
        """End after what was asked before. Blocks until then."""
        self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            entries = self._take()
            together: dict[int, list[_Advance]] = {}
            for entry in entries:
                if isinstance(entry, _Call):
                    _settle(entry.done, entry.work)
                elif entry is not None and not entry.done.cancelled():
                    together.setdefault(id(entry.writing.half), []).append(entry)
            for advances in together.values():
                _advance(advances)
            if None in entries:
                return

    def _take(self) -> list[_Advance | _Call | None]:
        """All that has arrived, up to a pass; waits for the first."""
        entries, rows = [self._inbox.get()], 0
        while rows < MAX_ROWS:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                break
            entries.append(entry)
            rows += entry.rows if isinstance(entry, _Advance) else 0
        return entries


def _advance(advances: Sequence[_Advance]) -> None:
    half = advances[0].writing.half
    try:
        logits = half.to_logits([entry.stride for entry in advances], [entry.output for entry in advances])
    except Exception as fault:  # noqa: BLE001 - carried to those who wait
        for entry in advances:
            _settle(entry.done, _raiser(fault))
        return
    for entry, own in zip(advances, logits, strict=True):
        _settle(entry.done, lambda entry=entry, own=own: entry.writing.go_on(own))


def _raiser(fault: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise fault

    return fail


def _settle(done: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
    """Do `work`, and hand what comes of it to the loop that waits."""
    try:
        result = work()
    except Exception as fault:  # noqa: BLE001 - carried to whoever waits
        _hand_over(done, lambda fault=fault: done.cancelled() or done.set_exception(fault))
    else:
        _hand_over(done, lambda: done.cancelled() or done.set_result(result))


def _hand_over(done: "asyncio.Future[Any]", tell: Callable[[], object]) -> None:
    try:
        done.get_loop().call_soon_threadsafe(tell)
    except RuntimeError:  # the loop is closed: nobody waits any more
        log.debug("nobody waits for what the torch thread has done")
