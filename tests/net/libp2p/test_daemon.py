"""The daemon: ours from start to end, whatever happens to us."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from corolla.errors import BadInput, SwarmError
from corolla.net.identity import ephemeral
from corolla.net.libp2p import daemon as daemons
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.control import Control
from corolla.net.libp2p.daemon import DaemonConfig, run_daemon

pytestmark = pytest.mark.slow
Script = Callable[[str], "Popen[str]"]
LOOPBACK = DaemonConfig([HostPort("ip4", "127.0.0.1", 0)])


def test_it_is_up_with_our_identity_and_gone_at_the_end(
    short_dir: Path, wait_gone: Callable[[int, float], float]
) -> None:
    async def scenario() -> int:
        identity = ephemeral()
        async with run_daemon(short_dir, identity, LOOPBACK) as daemon:
            peer, addresses = await Control(daemon.control_path).identify()
            assert peer == identity.peer
            assert len(addresses) == 1
            assert addresses[0].startswith("/ip4/127.0.0.1/tcp/")
            assert os.getsid(daemon.pid) == daemon.pid  # Ctrl-C reaches us, not it
            assert not (short_dir / "identity").exists()
            return daemon.pid

    wait_gone(asyncio.run(scenario()), 0.5)


def test_it_opens_no_port_but_the_one_it_was_told(short_dir: Path) -> None:
    async def scenario() -> None:
        async with run_daemon(short_dir, ephemeral(), LOOPBACK) as daemon:
            _, (address,) = await Control(daemon.control_path).identify()
            assert open_ports(daemon.pid) == {int(address.rpartition("/")[2])}
        async with run_daemon(short_dir, ephemeral(), DaemonConfig([], is_client=True)) as daemon:
            assert await Control(daemon.control_path).identify() != ()
            assert open_ports(daemon.pid) == set()

    asyncio.run(scenario())


def open_ports(pid: int) -> set[int]:
    """TCP ports it listens on and UDP ports it has bound, from the system's own tables."""
    inodes: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            what = os.readlink(entry)
            if what.startswith("socket:"):
                inodes.add(what.partition("[")[2].rstrip("]"))
    ports: set[int] = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            is_open = fields[3] == "0A" or table.startswith("udp")
            if is_open and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_ipv6_loopback_works(short_dir: Path) -> None:
    async def scenario() -> None:
        config = DaemonConfig([HostPort("ip6", "::1", 0)])
        async with run_daemon(short_dir, ephemeral(), config) as daemon:
            _, addresses = await Control(daemon.control_path).identify()
            assert [address.startswith("/ip6/::1/tcp/") for address in addresses] == [True]

    asyncio.run(scenario())


def test_what_is_announced_takes_the_place_of_its_own_addresses(short_dir: Path) -> None:
    async def scenario() -> None:
        announce = [HostPort("dns", "models.example.org", 4001), HostPort("ip4", "203.0.113.7", 4001)]
        config = DaemonConfig([HostPort("ip4", "127.0.0.1", 0)], announce)
        async with run_daemon(short_dir, ephemeral(), config) as daemon:
            _, addresses = await Control(daemon.control_path).identify()
            assert set(addresses) == {"/dns/models.example.org/tcp/4001", "/ip4/203.0.113.7/tcp/4001"}

    asyncio.run(scenario())


def test_a_port_in_use_is_named(short_dir: Path) -> None:
    async def scenario() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            config = DaemonConfig([HostPort("ip4", "127.0.0.1", port)])
            with pytest.raises(BadInput, match=rf"127\.0\.0\.1:{port}.*in use"):
                async with run_daemon(short_dir, ephemeral(), config):
                    pass

    asyncio.run(scenario())


def test_a_failed_start_tells_the_daemons_last_words(short_dir: Path) -> None:
    async def scenario() -> None:
        (short_dir / "control").mkdir()  # in the place of its socket
        with pytest.raises(SwarmError, match=r"ended while starting; it said: .*control"):
            async with run_daemon(short_dir, ephemeral(), LOOPBACK):
                pass

    asyncio.run(scenario())


def test_a_daemon_that_does_not_come_up_is_given_up(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = short_dir / "hivemind_cli" / "p2pd"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\necho about to hang\nexec sleep 600\n")
    binary.chmod(0o700)
    monkeypatch.setattr(daemons, "package_dir", lambda: short_dir)
    monkeypatch.setattr(daemons, "START_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        with pytest.raises(SwarmError, match=r"not up after .*about to hang"):
            async with run_daemon(short_dir, ephemeral(), LOOPBACK):
                pass

    asyncio.run(scenario())


def test_its_death_is_seen_within_a_second(short_dir: Path) -> None:
    async def scenario() -> None:
        async with run_daemon(short_dir, ephemeral(), LOOPBACK) as daemon:
            watching = asyncio.create_task(daemon.wait_ended())
            await asyncio.sleep(0)
            killed_at = time.monotonic()
            os.kill(daemon.pid, signal.SIGKILL)
            reason = await watching
            assert time.monotonic() - killed_at < 10
            assert "status -9" in reason

    asyncio.run(scenario())


def test_one_that_ignores_politeness_is_ended_by_force(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, wait_gone: Callable[[int, float], float]
) -> None:
    monkeypatch.setattr(daemons, "STOP_TIMEOUT_S", 0.3)

    async def scenario() -> int:
        async with run_daemon(short_dir, ephemeral(), LOOPBACK) as daemon:
            os.kill(daemon.pid, signal.SIGSTOP)
            return daemon.pid

    wait_gone(asyncio.run(scenario()), 1)


DAEMON_ALONE = """
import asyncio, sys
from pathlib import Path
from corolla.net.identity import ephemeral
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.daemon import DaemonConfig, run_daemon

async def main():
    directory = Path(sys.argv[0]).parent
    async with run_daemon(directory, ephemeral(), DaemonConfig([HostPort("ip4", "127.0.0.1", 0)])) as daemon:
        print(daemon.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""

WHOLE_TRANSPORT = """
import asyncio
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport

async def main():
    async with open_transport(NetworkConfig()) as transport:
        print(transport.daemon_pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("program", "within_s"),
    [
        pytest.param(WHOLE_TRANSPORT, 4, id="in use"),
        pytest.param(DAEMON_ALONE, 14, id="before the first stream"),  # its idle timeout is 10 s
    ],
)
def test_a_killed_process_leaves_no_daemon(
    python: Script, wait_gone: Callable[[int, float], float], program: str, within_s: float
) -> None:
    process = python(program)
    assert process.stdout is not None
    daemon_pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_gone(daemon_pid, within_s)
