"""Counts by name in which names that have nothing are forgotten: strangers must not grow the table.

Not a `Counter`: this runs in every step, and a Counter's misses and deletions are Python.
"""

from typing import TypeVar

Name = TypeVar("Name")


def add(counts: dict[Name, int], name: Name, amount: int) -> None:
    count = counts.get(name, 0) + amount
    if count:
        counts[name] = count
    else:
        counts.pop(name, None)
