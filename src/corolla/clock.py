"""Two clocks, kept apart.

*Loop time* (`asyncio.get_running_loop().time()`) measures durations and drives every timeout; tests make it
virtual. *Wall time* dates what travels between machines (records expire at a wall time); peers' wall clocks
differ, and how much is tolerated is decided where records are read.
"""

import asyncio
import time
from collections.abc import Callable

WallClock = Callable[[], float]
"""Seconds since the epoch, as this peer believes."""


def wall_time() -> float:
    """This machine's wall clock, in seconds since the epoch."""
    return time.time()


def loop_time() -> float:
    """Seconds on the running loop's clock; only differences mean something. Needs a running loop."""
    return asyncio.get_running_loop().time()
