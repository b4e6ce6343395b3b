"""Whom the processes of a swarm contact: those that the user named, and those met through them. Nobody else.

Sockets are looked at again and again, from a process' start to its end. A look may miss a short one; never does it
show one that is not there.
"""

import ipaddress
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.warm import WarmStart

pytestmark = pytest.mark.slow

Running = Callable[..., AbstractContextManager[subprocess.Popen[str]]]
LOOK_EVERY_S = 0.05
TIMEOUT_S = 200


class Contact(NamedTuple):
    """One connected socket (a datagram's too) of a process' family."""

    kind: socket.SocketKind
    port: int
    remote_host: str
    remote_port: int


@dataclass(slots=True)
class Lookout:
    """All that was seen of the processes with these pids and their children."""

    pids: list[int] = field(default_factory=list[int])
    seen: dict[int, set[Contact]] = field(default_factory=dict[int, set[Contact]])

    def look(self) -> None:
        for pid in self.pids:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
                process = psutil.Process(pid)
                for member in (process, *process.children(recursive=True)):
                    self.seen.setdefault(pid, set()).update(contacts_of(member))


def contacts_of(process: psutil.Process) -> Iterator[Contact]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for end in process.net_connections("inet"):
            if end.raddr:
                yield Contact(socket.SocketKind(end.type), end.laddr.port, end.raddr.ip, end.raddr.port)


@contextmanager
def keep_looking() -> Iterator[Lookout]:
    lookout, is_over = Lookout(), threading.Event()

    def run() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            lookout.look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lookout
    finally:
        is_over.set()
        thread.join()


@contextmanager
def chatting(warm: WarmStart, model: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    """A client that stays until it is told to leave."""
    command = [sys.executable, "-m", "corolla", "chat", str(model), "--max-new-tokens", "8", "--join", address]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm.popen(command, text=True, env={**os.environ, **ONE_THREAD}, **pipes) as client:
        try:
            yield client
        finally:
            if client.poll() is None:
                client.kill()


def test_a_server_and_a_client_contact_nobody_but_each_other(running: Running, warm: WarmStart, tiny: Path) -> None:
    with keep_looking() as lookout, running("serve", tiny) as server:
        lookout.pids.append(server.pid)
        assert server.stdout is not None
        address = server.stdout.readline().rpartition("addr=")[2].strip()
        port = int(address.split("/")[4])
        with chatting(warm, tiny, address) as client:
            lookout.pids.append(client.pid)
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write("w9 w10\n")
            client.stdin.flush()
            assert client.stdout.readline()
            lookout.look()  # at least now both are there
            _, said = client.communicate("/exit\n", timeout=TIMEOUT_S)
    assert client.returncode == 0, said
    of_server, of_client = lookout.seen[server.pid], lookout.seen[client.pid]
    assert {contact.kind for contact in of_server | of_client} == {socket.SOCK_STREAM}
    assert all(ipaddress.ip_address(contact.remote_host).is_loopback for contact in of_server | of_client)
    assert {contact.remote_port for contact in of_client} == {port}
    assert {contact.port for contact in of_server} == {port}  # others came to it
