"""Byte ranges: which of a file's bytes are wanted, which are there, which must still come.

Every range is half-open, `(start, end)`. Lists of them may overlap and come in any order until `merge` has tidied them.
"""

from collections.abc import Iterable

Range = tuple[int, int]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible, in order."""
    merged: list[Range] = []
    for start, end in sorted(span for span in ranges if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(wanted: Iterable[Range], held: Iterable[Range]) -> list[Range]:
    """What of `wanted` is not in `held`."""
    missing: list[Range] = []
    gone = merge(held)
    for start, end in merge(wanted):
        for held_start, held_end in gone:
            if held_end <= start or end <= held_start:
                continue
            if start < held_start:
                missing.append((start, held_start))
            start = min(held_end, end)
        if start < end:
            missing.append((start, end))
    return missing


def split(ranges: Iterable[Range], most_bytes: int) -> list[Range]:
    """The same ranges in pieces of at most `most_bytes`."""
    return [(first, min(first + most_bytes, end)) for start, end in ranges for first in range(start, end, most_bytes)]


def count_bytes(ranges: Iterable[Range]) -> int:
    """How many bytes they are together."""
    return sum(end - start for start, end in ranges)
