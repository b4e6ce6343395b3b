"""How few of a key's keepers a reader may ask: decisions that the real network and the one in memory share.

Each of eight peers keeps the same, and answers with all of it: with a thousand servers half a megabyte became four. So
a reader asks three, by lot, and everybody near the key where that leaves a doubt: at its first reading, when one fails,
when none has anything, and when one lacks what another has or what was there the last time. One or two keepers that
leave records out hide nothing. Three that agree to can hide newcomers, and a sixteenth of what the reader knows, until
the lot falls on another: once in 56 readings where they are the only ones. A first reading does not depend on the lot.
"""

import random
from collections.abc import Collection, Sequence
from typing import Final, TypeVar

from corolla.ids import PeerId
from corolla.net.records import REPLICAS

ASKED_FIRST: Final = 3
TOLERATED_SHARE: Final = 1 / 16
"""Of all that is known, how much one keeper may lack. Records come and go between two answers; what three that lose
records by chance all lack is less than 1 in 4,000. Below 16 records nothing may be missing."""
_MAX_KEYS: Final = 256
"""Whose last readings are remembered: a model takes four, and a gateway serves several models."""


Keeper = TypeVar("Keeper")


class Readings:
    """Whom this reader asks; it remembers whose records each key had when it was last read."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: dict[str, frozenset[PeerId]] = {}

    def choose_first(self, key: str, near: Sequence[Keeper], *, are_we_near: bool) -> list[Keeper]:
        """Of the peers near the key, the nearest first, those to ask now.

        `are_we_near`: we keep the key ourselves, so its eighth keeper as others see it is our seventh.
        """
        keepers = near[: REPLICAS - are_we_near]
        if key not in self._seen or len(keepers) <= ASKED_FIRST:
            return list(near)
        return self._rng.sample(keepers, ASKED_FIRST)

    def is_doubtful(
        self, key: str, answers: Sequence[Collection[PeerId] | None], ours: Collection[PeerId] = frozenset()
    ) -> bool:
        """Whether the others must be asked too. `answers`: whose living records each has; None: it gave no answer."""
        given = [frozenset(answer) for answer in answers if answer is not None]
        if len(given) < len(answers) or not any(given):
            return True
        known = self._seen.get(key, frozenset()).union(ours, *given)
        return any(len(known) - len(answer) > TOLERATED_SHARE * len(known) for answer in given)

    def note(self, key: str, peers: Collection[PeerId]) -> None:
        """Whose living records a reading has found; not to be told of one that nobody answered."""
        self._seen.pop(key, None)
        self._seen[key] = frozenset(peers)
        if len(self._seen) > _MAX_KEYS:
            del self._seen[next(iter(self._seen))]
