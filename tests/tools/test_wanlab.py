"""The router of the slow network: packets take their time, in order, and vanish where a cable is pulled."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "wanlab.py"
HOSTS = 3
ONE_WAY_S = 0.05


@pytest.fixture(scope="module")
def wanlab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wanlab", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wanlab"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cables() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """For each host, its own end and the router's."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(HOSTS)]
    for pair in pairs:
        for end in pair:
            end.setblocking(False)
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


Cables = list[tuple[socket.socket, socket.socket]]


def router(wanlab: ModuleType, cables: Cables, **weather: float) -> object:
    one_way_s = tuple(tuple(ONE_WAY_S for _ in range(HOSTS)) for _ in range(HOSTS))
    return wanlab.Router(wanlab.Weather(one_way_s, **weather), [inner.fileno() for _, inner in cables])


def packet(target: int, content: bytes) -> bytes:
    header = bytearray(20)
    header[0] = 4 << 4 | 5
    header[16:20] = bytes((10, 99, 0, target + 1))
    return bytes(header) + content


def received(cable: tuple[socket.socket, socket.socket]) -> list[bytes]:
    packets: list[bytes] = []
    while True:
        try:
            packets.append(cable[0].recv(2048)[20:])
        except BlockingIOError:
            return packets


def test_packets_arrive_after_their_time_and_in_order(wanlab: ModuleType, cables: Cables) -> None:
    route = router(wanlab, cables, jitter_s=0.02)
    for number in range(5):
        cables[0][0].send(packet(1, bytes([number])))
    now = time.monotonic()
    route.take_from(0)
    route.deliver(now + ONE_WAY_S - 0.001)
    assert received(cables[1]) == []
    assert 0 < route.wait_s(now) < ONE_WAY_S + 0.1
    route.deliver(now + 1)
    assert received(cables[1]) == [bytes([number]) for number in range(5)]
    assert received(cables[2]) == []


def test_a_narrow_line_sends_one_packet_after_another(wanlab: ModuleType, cables: Cables) -> None:
    route = router(wanlab, cables, byte_s=0.001)
    for _ in range(3):
        cables[0][0].send(packet(1, bytes(80)))
    now = time.monotonic()
    route.take_from(0)
    arrived = 0
    for expected in (1, 2, 3):
        route.deliver(now + ONE_WAY_S + 0.1 * expected + 0.05)
        arrived += len(received(cables[1]))
        assert arrived == expected


def test_a_pulled_cable_swallows_packets_until_it_is_plugged_in(wanlab: ModuleType, cables: Cables) -> None:
    route = router(wanlab, cables)

    def arrives(source: int, target: int) -> bool:
        cables[source][0].send(packet(target, b"x"))
        route.take_from(source)
        route.deliver(time.monotonic() + 1)
        return received(cables[target]) == [b"x"]

    wanlab.obey(route, ["cut 1", "cut 0-2"])
    assert not arrives(0, 1)
    assert not arrives(1, 2)
    assert not arrives(0, 2)
    assert not arrives(2, 0)
    wanlab.obey(route, ["heal 1", "heal 0-2"])
    assert arrives(0, 1)
    assert arrives(2, 0)


def test_what_is_for_nobody_here_goes_nowhere(wanlab: ModuleType, cables: Cables) -> None:
    route = router(wanlab, cables)
    for stray in (b"", b"\x60" + bytes(40), packet(HOSTS, b"x"), packet(200, b"x"), bytes(20)):
        os.write(cables[0][0].fileno(), stray)
    route.take_from(0)
    route.deliver(time.monotonic() + 1)
    assert [received(cable) for cable in cables] == [[], [], []]


def test_an_unknown_command_is_named(wanlab: ModuleType, cables: Cables, capsys: pytest.CaptureFixture[str]) -> None:
    route = router(wanlab, cables)
    wanlab.obey(route, ["cut", "cut one", "heal 1-", "cut 2"])
    assert route.cut == {frozenset({2})}
    assert capsys.readouterr().err.count("not '") == 3


def test_without_what_it_needs_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(PATH)],
        env={"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("wanlab cannot run here: ")
    assert done.stdout == ""
