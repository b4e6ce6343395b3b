"""What a check found, and what to do about it: for people, in `corolla doctor` and at a server's start."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "unsure", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`unsure` holds nothing up; `bad` means that this peer will not work as asked."""

    check: str
    """One word: which check this is of."""
    state: State
    text: str
    next_step: str = ""
    """What the user can do; empty when there is nothing to do."""
