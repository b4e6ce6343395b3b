"""A guard for what does not survive a fork.

After a fork (a DataLoader worker, say) the loop's thread is gone, and the sockets are shared with the parent: a
write from the child would land in the middle of the parent's stream.
"""

import os

from corolla.errors import LocalProtocolError


class OwnProcess:
    """Remembers which process made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises LocalProtocolError in any other process."""
        if os.getpid() != self._pid:
            raise LocalProtocolError("the network cannot be used after a fork: open a transport in the new process")
