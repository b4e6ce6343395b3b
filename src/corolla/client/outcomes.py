"""What comes of asking several servers at once: all results, or whose failure it was and which blocks lack a server."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from corolla.client.hop import Hop
from corolla.client.recovery import Place
from corolla.errors import CacheFull, HopFailed, Overloaded, RemoteProtocolError, SessionLost, SwarmError
from corolla.ids import PeerId

T = TypeVar("T")


class PlacesFailed(Exception):
    """Taking a route failed at these servers, asked for these blocks; others may do."""

    def __init__(self, errors: Mapping[PeerId, SwarmError], blocks: Sequence[int]) -> None:
        self.errors = errors
        self.blocks = blocks
        self.error = next(iter(errors.values()))
        super().__init__(str(self.error))


MAY_DO_ELSEWHERE = (HopFailed, CacheFull, Overloaded, SessionLost, RemoteProtocolError)
"""What one server's failure to take a place looks like; everything else is our own mistake."""


def all_or_failed(places: Sequence[Place | Hop], outcomes: Sequence[T | BaseException]) -> list[T]:
    """The results. Raises what is our own mistake, else PlacesFailed with every server's error."""
    results: list[T] = []
    errors: dict[PeerId, SwarmError] = {}
    blocks: list[int] = []
    for place, outcome in zip(places, outcomes, strict=True):
        if isinstance(outcome, MAY_DO_ELSEWHERE):
            errors[place.peer] = outcome
            blocks += range(place.start, place.end)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results.append(outcome)
    if errors:
        raise PlacesFailed(errors, blocks)
    return results
