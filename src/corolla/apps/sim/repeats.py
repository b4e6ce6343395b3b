"""Frames that come twice, or once more after others: what a route's change under sent steps does, without any need.

A stream never repeats bytes by itself; peers do. `step_no` has to sort it out.
"""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

from corolla.net.channel import Channel
from corolla.wire.messages import AnyMessage, Output, Step

KEPT: Final = 4
"""Fewer than a session's journal keeps: what is older would rightly be refused as gone."""
OFTEN: Final = 0.2
"""How many steps and outputs have one of the last few sent behind them."""


class Repeats:
    """Counts what was sent again."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def frames_come_again(rng: random.Random) -> Iterator[Repeats]:
    """Inside the block every channel of this process sends some steps and outputs twice, and some again after others.

    For simulations, which have a process's channels to themselves.
    """
    repeats, send = Repeats(), Channel.send
    all_sent: WeakKeyDictionary[Channel, deque[AnyMessage]] = WeakKeyDictionary()

    def send_and_repeat(self: Channel, message: AnyMessage) -> None:
        send(self, message)
        if isinstance(message, Step | Output):
            sent = all_sent.setdefault(self, deque(maxlen=KEPT))
            sent.append(message)
            if rng.random() < OFTEN:
                repeats.count += 1
                send(self, rng.choice(sent))

    Channel.send = send_and_repeat
    try:
        yield repeats
    finally:
        Channel.send = send
