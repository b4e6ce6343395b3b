#!/usr/bin/env python3
"""Several hosts with a slow network between them, on one machine.

Makes network namespaces h0 … with addresses 10.99.0.1 … and joins them by a router in this process, which delays,
paces and drops packets as it is told (no netem needed). Unmodified programs run on a host with

    ip netns exec h1 COMMAND

    wanlab.py --hosts 4 --rtt-ms 50 [--mbit 100] [--loss 0.01] [--jitter-ms 5] [--pairs 0-1=100,1-2=20]

Prints `ready` when the hosts can reach each other and runs until SIGTERM, SIGINT or the end of standard input if
`--exit-with-parent` is given; then the namespaces are gone. Commands on standard input, one a line:

    cut 2      unplug host 2: its packets vanish, and nobody is told
    cut 1-2    the same for packets between these two
    heal 2     plug it in again; also `heal 1-2`

Needs root, iproute2 and /dev/net/tun; says which is missing and exits with 3. IPv4 only. Namespaces of the same
names are replaced. No packet leaves the machine.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
NETWORK: Final = bytes((10, 99, 0))
TUN_DEVICE: Final = "/dev/net/tun"
MAX_PACKET: Final = 65535
PACKETS_PER_WAKE: Final = 64
"""Read from one host before the queue is looked at again, so that no host delays the others' packets."""
SPIN_S: Final = 0.001
"""epoll sleeps in whole milliseconds: the last one before a packet is due is spun away."""
IDLE_S: Final = 0.5
CANNOT_RUN: Final = 3

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to a packet between any two hosts."""

    one_way_s: tuple[tuple[float, ...], ...]
    """From host, to host."""
    byte_s: float = 0.0
    """Seconds that one byte occupies a host's way out; 0: no bound."""
    loss: float = 0.0
    jitter_s: float = 0.0


@dataclass(slots=True)
class Router:
    """Reads packets from hosts, and gives each to its destination when its time has come."""

    weather: Weather
    devices: Sequence[int]
    """File descriptor of each host's TUN device."""
    cut: set[frozenset[int]] = field(default_factory=set[frozenset[int]])
    """Hosts, alone or in pairs, whose packets vanish."""
    _queue: list[tuple[float, int, int, bytes]] = field(default_factory=list[tuple[float, int, int, bytes]])
    _sequence: int = 0
    _free_at: dict[int, float] = field(default_factory=dict[int, float])
    _last_due: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def wait_s(self, now: float) -> float:
        """Until the next packet is due."""
        return max(0.0, self._queue[0][0] - now) if self._queue else IDLE_S

    def take_from(self, source: int) -> None:
        """Put what this host has sent into the queue."""
        for _ in range(PACKETS_PER_WAKE):
            try:
                packet = os.read(self.devices[source], MAX_PACKET)
            except BlockingIOError:
                return
            target = self._target(packet)
            if target is not None and not self._is_lost(source, target):
                self._sequence += 1
                heapq.heappush(self._queue, (self._due(source, target, len(packet)), self._sequence, target, packet))

    def deliver(self, now: float) -> None:
        """Hand over every packet that is due."""
        while self._queue and self._queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._queue)
            try:
                os.write(self.devices[target], packet)
            except OSError:
                continue  # its queue is full, or it is going away: a packet is lost, as on any network

    def _target(self, packet: bytes) -> int | None:
        """The host that an IPv4 packet is for; None: nobody here."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != NETWORK:
            return None
        host = packet[19] - 1
        return host if 0 <= host < len(self.devices) else None

    def _is_lost(self, source: int, target: int) -> bool:
        ways = (frozenset({source}), frozenset({target}), frozenset({source, target}))
        return any(way in self.cut for way in ways) or random.random() < self.weather.loss  # noqa: S311

    def _due(self, source: int, target: int, num_bytes: int) -> float:
        """After it has waited for its host's line and travelled; a link keeps the order."""
        weather = self.weather
        sent = max(time.monotonic(), self._free_at.get(source, 0.0)) + num_bytes * weather.byte_s
        self._free_at[source] = sent
        arrives = sent + weather.one_way_s[source][target] + random.random() * weather.jitter_s  # noqa: S311
        due = max(arrives, self._last_due.get((source, target), 0.0))
        self._last_due[source, target] = due
        return due


class Lines:
    """Commands as they come on standard input."""

    def __init__(self) -> None:
        self._rest = b""
        os.set_blocking(0, False)

    def read(self) -> list[str] | None:
        """The whole lines that have come; None: the input has ended."""
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace").strip() for line in lines]


def main() -> int:
    options = parse_options()
    if (missing := what_is_missing()) is not None:
        sys.stderr.write(f"wanlab cannot run here: {missing}\n")
        return CANNOT_RUN
    with ExitStack() as stack:
        devices = [stack.enter_context(host(f"{options.prefix}{i}", i, options.mtu)) for i in range(options.hosts)]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        run(Router(weather_of(options), devices), exit_with_parent=options.exit_with_parent)
    return 0


def what_is_missing() -> str | None:
    """The reason why no such network can be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "it needs root"
    if shutil.which("ip") is None:
        return "it needs iproute2's `ip`"
    try:
        os.close(os.open(TUN_DEVICE, os.O_RDWR))
    except OSError as fault:
        return f"{TUN_DEVICE} cannot be opened: {fault.strerror}"
    made = subprocess.run(["ip", "netns", "add", "wanlab-probe"], capture_output=True, text=True, check=False)  # noqa: S607
    subprocess.run(["ip", "netns", "del", "wanlab-probe"], capture_output=True, check=False)  # noqa: S607
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rtt-ms", type=float, default=50)
    parser.add_argument("--mbit", type=float, default=0, help="of each host's way out; 0: no bound")
    parser.add_argument("--loss", type=float, default=0, help="share of packets")
    parser.add_argument("--jitter-ms", type=float, default=0)
    parser.add_argument("--pairs", default="", help="round trips of single pairs in ms, such as 0-1=100,1-2=20")
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--prefix", default="h", help="of the hosts' names")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input does")
    return parser.parse_args()


def weather_of(options: argparse.Namespace) -> Weather:
    one_way_s = [[options.rtt_ms / 2000.0] * options.hosts for _ in range(options.hosts)]
    for item in filter(None, options.pairs.split(",")):
        pair, milliseconds = item.split("=")
        one, other = map(int, pair.split("-"))
        one_way_s[one][other] = one_way_s[other][one] = float(milliseconds) / 2000.0
    byte_s = 8 / (options.mbit * 1e6) if options.mbit else 0.0
    return Weather(tuple(map(tuple, one_way_s)), byte_s, options.loss, options.jitter_ms / 1000)


@contextmanager
def host(name: str, number: int, mtu: int) -> Iterator[int]:
    """A network namespace with one TUN device in it, whose file descriptor is held here; gone with the block."""
    ip("netns", "del", name, check=False)
    ip("netns", "add", name)
    try:
        with inside(name):
            device = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wan0", IFF_TUN | IFF_NO_PI))
            ip("addr", "add", f"10.99.0.{number + 1}/24", "dev", "wan0")
            ip("link", "set", "wan0", "mtu", str(mtu), "txqueuelen", "5000", "up")
            ip("link", "set", "lo", "up")
        try:
            yield device
        finally:
            os.close(device)
    finally:
        ip("netns", "del", name, check=False)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and what it starts, is in that namespace for the length of the block."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        enter(there)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(home)
        os.close(there)


def enter(namespace: int) -> None:
    if _libc.setns(namespace, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)  # noqa: S603, S607


def run(router: Router, *, exit_with_parent: bool) -> None:
    """Route until told to end."""
    stop: list[int] = []
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, lambda number, _frame: stop.append(number))
    lines = Lines()
    with selectors.DefaultSelector() as selector:
        for number, device in enumerate(router.devices):
            selector.register(device, selectors.EVENT_READ, number)
        with contextlib.suppress(PermissionError):  # a plain file or /dev/null: no commands will come
            selector.register(0, selectors.EVENT_READ, None)
        while not stop:
            wait_s = router.wait_s(time.monotonic())
            for key, _ in selector.select(0 if wait_s <= SPIN_S else wait_s - SPIN_S):
                if key.data is not None:
                    router.take_from(key.data)
                elif (commands := lines.read()) is not None:
                    obey(router, commands)
                elif exit_with_parent:
                    return
                else:
                    selector.unregister(0)
            router.deliver(time.monotonic())


def obey(router: Router, commands: Sequence[str]) -> None:
    for command in commands:
        matched = re.fullmatch(r"(cut|heal) (\d+)(?:-(\d+))?", command)
        if matched is None:
            sys.stderr.write(f"wanlab: cut N, cut N-M, heal N or heal N-M, not {command!r}\n")
            continue
        verb, *hosts = matched.groups()
        way = frozenset(int(host) for host in hosts if host is not None)
        (router.cut.add if verb == "cut" else router.cut.discard)(way)


if __name__ == "__main__":
    sys.exit(main())
