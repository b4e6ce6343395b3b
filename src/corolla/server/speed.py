"""How fast the hosted blocks run here: a few steps at start, remembered for the next start.

What is measured is compared between servers (routes, placement), so a rough figure does; `meter.py` corrects it by
real work. It depends on the model, the device, the number format and how many blocks there are: that is its key.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch

from corolla.ids import Fingerprint
from corolla.models.cache import SpanCache
from corolla.models.quantization import Quantization
from corolla.models.span import Span

log = logging.getLogger(__name__)

DECODE_STEPS = 4
PREFILL_TOKENS = 64
MAX_REMEMBERED: Final = 256
"""Entries of the file; the oldest go first."""

Speed = tuple[float, float]
"""(decode, prefill) in tokens a second through all hosted blocks, one row."""


@dataclass(frozen=True, slots=True)
class SpeedKey:
    """What a speed depends on, as far as servers tell it apart."""

    model: Fingerprint
    device: str
    dtype: torch.dtype
    num_blocks: int
    quantization: Quantization = "none"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        held = dtype if self.quantization == "none" else f"{dtype} {self.quantization}"
        return f"{self.model} {_device_name(torch.device(self.device))} {held} {self.num_blocks}"


def remembered_speed(span: Span, key: SpeedKey, file: Path, *, prepare: Callable[[], object] | None = None) -> Speed:
    """As measured at an earlier start on this device, else measured now and written into `file`.

    `prepare` is called before a measurement. A file that cannot be read or written costs a measurement, nothing more.
    """
    if (known := recall_speed(key, file)) is not None:
        return known
    if prepare is not None:
        prepare()
    measured = measure_speed(span)
    remember_speed(key, measured, file)
    return measured


def recall_speed(key: SpeedKey, file: Path) -> Speed | None:
    """What `file` says; None: nothing."""
    return _read(file).get(str(key))


def remember_speed(key: SpeedKey, speed: Speed, file: Path) -> None:
    """For the next start: as measured, or as real work has corrected it since."""
    speeds = _read(file)
    speeds.pop(str(key), None)  # comes last again: the oldest go first
    _write(file, {**speeds, str(key): speed})


def measure_speed(span: Span) -> Speed:
    """A few steps of zeros through the blocks; the best decode step counts, and the first prefill."""
    cache = span.new_cache(1)
    prompt = torch.zeros(1, PREFILL_TOKENS, span.hidden_size, dtype=span.dtype, device=span.device)
    token_ids = torch.zeros(1, PREFILL_TOKENS, dtype=torch.int64, device=span.device)
    prefill_s = _seconds(span, cache, prompt, token_ids)
    decodes = [_seconds(span, cache, prompt[:, :1], token_ids[:, :1]) for _ in range(DECODE_STEPS)]
    return 1 / min(decodes), PREFILL_TOKENS / prefill_s


def _seconds(span: Span, cache: SpanCache, hidden: torch.Tensor, token_ids: torch.Tensor) -> float:
    began = time.perf_counter()
    output = span.forward(hidden, cache, token_ids=token_ids)
    output.flatten()[0].item()  # a GPU works behind our back: wait for its result
    return max(time.perf_counter() - began, 1e-9)


def _device_name(device: torch.device) -> str:
    """Tells two machines that share a home directory apart, as far as their speed may differ."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} of {torch.get_num_threads()} threads"


def _read(file: Path) -> dict[str, Speed]:
    """What the file holds and makes sense."""
    try:
        entries = cast("object", json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    speeds: dict[str, Speed] = {}
    for key, entry in cast("dict[str, object]", entries).items():
        match entry:
            case [float(decode), float(prefill)] if 0 < decode < 1e12 and 0 < prefill < 1e12:
                speeds[key] = decode, prefill
            case _:
                continue
    return speeds


def _write(file: Path, speeds: dict[str, Speed]) -> None:
    """Into place by a rename, so that another server never reads half of it."""
    partial = file.with_name(f"{file.name}.{time.time_ns()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dict(list(speeds.items())[-MAX_REMEMBERED:])))
        partial.replace(file)
    except OSError as fault:
        log.info("the measured speed is not remembered", extra={"reason": str(fault)})
