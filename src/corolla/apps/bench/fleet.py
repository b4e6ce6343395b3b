"""Server processes with replicas, to lose some of: new ones start in the place of those that are killed."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corolla.apps.bench.setup import RECORDS_S
from corolla.apps.processes import Child, Processes
from corolla.ids import PeerId

START_TIMEOUT_S = 180.0


@dataclass(slots=True)
class Member:
    """One server process with its network daemon."""

    span: str
    child: Child
    peer: PeerId | None = None
    """Known once it is ready, like the number of its daemon: to ask at the moment of a kill would take too long."""
    daemon: int = 0

    @property
    def pids(self) -> tuple[int, int]:
        return self.daemon, self.child.process.pid

    def wait_ready(self) -> PeerId:
        if self.peer is None:
            self.peer = self.child.wait_ready(time.monotonic() + START_TIMEOUT_S).peer
            self.daemon = self.child.daemon_pid
        return self.peer


Blow = Callable[[Member], None]


def kill_family(member: Member) -> None:
    """The end of a machine: Python and its daemon at once."""
    for pid in member.pids:
        os.kill(pid, signal.SIGKILL)


def kill_python(member: Member) -> None:
    os.kill(member.child.process.pid, signal.SIGKILL)


def kill_daemon(member: Member) -> None:
    os.kill(member.daemon, signal.SIGKILL)


def freeze(member: Member) -> None:
    """Silence without a reset; the fleet thaws it when it gathers."""
    for pid in member.pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(member: Member) -> None:
    for pid in member.pids:
        os.kill(pid, signal.SIGCONT)


def ask_to_leave(member: Member) -> None:
    """What a user's Ctrl-C or a service manager does: the server drains."""
    os.kill(member.child.process.pid, signal.SIGTERM)


@dataclass(slots=True)
class Fleet:
    """Who is up, who is on the way, who is gone. The bootstrap peer is never lost."""

    processes: Processes
    model: Path
    spans: tuple[str, ...]
    serve_options: tuple[str, ...] = ()
    replicas: int = 3
    """Of each span, up or on the way."""
    min_replicas: int = 2
    """What `gather` waits for: one to lose and one to take its place."""
    address: str = ""
    up: dict[PeerId, Member] = field(default_factory=dict[PeerId, Member])
    starting: list[Member] = field(default_factory=list[Member])
    frozen: list[Member] = field(default_factory=list[Member])
    lost: list[Member] = field(default_factory=list[Member])

    def launch(self) -> None:
        """Start a bootstrap peer and all servers; `gather` waits for them."""
        bootstrap = self.processes.start("the bootstrap peer", "bootstrap")
        self.address = bootstrap.wait_ready(time.monotonic() + START_TIMEOUT_S).addr
        self.replace_lost()

    def begin(self, span: str) -> None:
        words = ("serve", str(self.model), "--blocks", span, *self.serve_options, "--join", self.address)
        self.starting.append(Member(span, self.processes.start(f"server {span}", *words)))

    def gather(self) -> None:
        """Thaw the frozen, and wait until every span has its replicas."""
        while self.frozen:
            member = self.frozen.pop()
            thaw(member)
            self.up[member.wait_ready()] = member
        while lacking := [span for span in self.spans if self.count(span) < self.min_replicas]:
            self._welcome(next(member for member in self.starting if member.span in lacking))

    def wait_all(self) -> None:
        """Wait for everyone on the way: nobody's start then takes compute from what is measured."""
        has_newcomers = bool(self.starting)
        self.gather()
        while self.starting:
            self._welcome(self.starting[0])
        if has_newcomers:
            time.sleep(RECORDS_S)

    def count(self, span: str) -> int:
        return sum(member.span == span for member in self.up.values())

    def strike(self, blow: Blow, peers: Sequence[PeerId]) -> None:
        """Lose these servers, all at once."""
        victims = [self._take(peer) for peer in peers]
        for victim in victims:
            blow(victim)
        (self.frozen if blow is freeze else self.lost).extend(victims)

    def replace_lost(self) -> None:
        """Start a server for each that is missing; returns at once."""
        for span in self.spans:
            there = self.count(span) + sum(member.span == span for member in (*self.starting, *self.frozen))
            for _ in range(self.replicas - there):
                self.begin(span)

    def _take(self, peer: PeerId) -> Member:
        """One that serves: it may have become ready since we looked."""
        for member in list(self.starting):
            if peer not in self.up and member.child.has_spoken:
                self._welcome(member)
        return self.up.pop(peer)

    def _welcome(self, member: Member) -> None:
        peer = member.wait_ready()
        self.starting.remove(member)
        self.up[peer] = member
