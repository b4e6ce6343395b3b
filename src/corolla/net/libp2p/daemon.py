"""The libp2p daemon (`p2pd`, a Go program that comes with hivemind), started, watched and ended by us.

It runs in its own process session, so that Ctrl-C reaches Python alone and a goodbye can still be sent. It ends
with us even on `kill -9`: it follows its control connections, and before there is one, its idle timeout. Its
output is a pipe that we read: the last lines explain a failed start, and its end is how we notice its death,
within milliseconds.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corolla.errors import BadInput, SwarmError
from corolla.net.identity import Identity
from corolla.net.libp2p.addresses import HostPort, check_can_listen, resolve
from corolla.net.libp2p.lean import package_dir

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 20.0
"""It takes 0.2–0.4 s; a machine that loads a model on all cores may need ten times that."""
STOP_TIMEOUT_S: Final = 3.0
_IDLE_TIMEOUT: Final = "10s"
_READY_LINE: Final = "Peer ID:"
_SAYS_WHERE_IT_IS: Final = ("Control socket:", _READY_LINE, "Peer Addrs:", "/")
_KEPT_LINES: Final = 20
_MAX_LINE_BYTES: Final = 4096

_TALKS_TO_NO_STRANGER: Final = (
    "-relay=0",
    "-relayService=0",
    "-relayDiscovery=0",
    "-autoRelay=0",
    "-autonat=0",
    "-natPortMap=0",
    "-b=0",
)


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """How the daemon meets the world."""

    listen: Sequence[HostPort]
    """Where it accepts connections; empty: nowhere, it only dials."""
    announce: Sequence[HostPort] = ()
    """What it tells others in place of its own addresses (behind a port forward, say)."""
    is_client: bool = False
    """It asks the daemons' address book but keeps no part of it."""


class Daemon:
    """A running daemon; `control_path` is its control socket. Made by `run_daemon`."""

    def __init__(self, process: subprocess.Popen[bytes], control_path: Path) -> None:
        assert process.stdout is not None
        self.control_path = control_path
        self._process = process
        self._output = process.stdout
        self._loop = asyncio.get_running_loop()
        self._is_ready = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._unfinished = b""
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._output.fileno(), self._on_output)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> None:
        """Raises SwarmError, with the daemon's last words, when it ends instead or takes too long."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                waits = [asyncio.ensure_future(event.wait()) for event in (self._is_ready, self._has_ended)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        except TimeoutError:
            raise SwarmError(f"the network daemon was not up after {START_TIMEOUT_S:.0f} s{self._said()}") from None
        if not self._is_ready.is_set():
            raise SwarmError(f"the network daemon ended while starting{self._said()}")

    async def wait_ended(self) -> str:
        """Return when the daemon is gone, with a reason a person can read."""
        await self._has_ended.wait()
        await self._reap(STOP_TIMEOUT_S)
        return f"the network daemon ended (status {self._process.poll()}){self._said()}"

    async def stop(self) -> None:
        """End it: politely, then by force. Afterwards there is no process."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                await self._reap(STOP_TIMEOUT_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
            if not self._output.closed:
                self._loop.remove_reader(self._output.fileno())
                self._output.close()
            self._has_ended.set()

    async def _reap(self, timeout_s: float) -> None:
        """Wait for the child; polled, because asyncio's and uvloop's watchers want the main thread, which may not be
        ours."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._process.poll() is None:  # noqa: ASYNC110 (nothing tells us but asking)
                    await asyncio.sleep(0.01)

    def _on_output(self) -> None:
        try:
            data = os.read(self._output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, rest = (self._unfinished + data).split(b"\n")
        self._unfinished = rest[-_MAX_LINE_BYTES:]
        for line in lines if data else [self._unfinished]:
            self._on_line(line.decode(errors="replace").strip()[:_MAX_LINE_BYTES])
        if not data:
            self._loop.remove_reader(self._output.fileno())
            self._output.close()
            self._has_ended.set()

    def _on_line(self, line: str) -> None:
        if line and not line.startswith(_SAYS_WHERE_IT_IS):
            self._last_lines.append(line)
            log.debug("daemon says", extra={"line": line})
        if line.startswith(_READY_LINE):
            self._is_ready.set()

    def _said(self) -> str:
        return f"; it said: {' | '.join(self._last_lines)}" if self._last_lines else ""


@asynccontextmanager
async def run_daemon(directory: Path, identity: Identity, config: DaemonConfig) -> AsyncIterator[Daemon]:
    """A daemon that is up, with its sockets in `directory`, until the block ends.

    Raises BadInput, naming the address, when it cannot listen where it should.
    """
    listen = [resolve(endpoint) for endpoint in config.listen]
    for endpoint in listen:
        check_can_listen(endpoint)
    control_path, key_path = directory / "control", directory / "identity"
    key_path.touch(0o600)
    key_path.write_bytes(identity.key_file())
    daemon = Daemon(_spawn(_command(control_path, key_path, listen, config)), control_path)
    try:
        await daemon.wait_ready()
        key_path.unlink()
        yield daemon
    finally:
        await daemon.stop()


def _command(control_path: Path, key_path: Path, listen: Sequence[HostPort], config: DaemonConfig) -> list[str]:
    command = [
        str(package_dir() / "hivemind_cli" / "p2pd"),
        f"-listen=/unix{control_path}",
        f"-id={key_path}",
        f"-idleTimeout={_IDLE_TIMEOUT}",
        *_TALKS_TO_NO_STRANGER,
        "-dhtClient=1" if config.is_client else "-dhtServer=1",
        f"-hostAddrs={_join(listen)}" if listen else "-noListenAddrs=1",
    ]
    return [*command, f"-announceAddrs={_join(config.announce)}"] if config.announce else command


def _join(endpoints: Sequence[HostPort]) -> str:
    return ",".join(endpoint.multiaddr for endpoint in endpoints)


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 (our own words: paths and checked addresses)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "GOLOG_LOG_LEVEL": "error"},
        )
    except OSError as fault:
        raise BadInput(f"cannot start the network daemon {command[0]}: {fault.strerror or fault}") from fault
