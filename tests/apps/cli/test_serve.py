"""`corolla serve`: what its options become, and that no key shows in what it says. The server itself stays away."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corolla.apps.cli import main as frame
from corolla.errors import HopFailed
from corolla.net.gate import GateConfig
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import identity_of
from corolla.net.swarm_key import load_keys, new_key
from corolla.server import server
from corolla.server.config import ServerConfig

A, B = identity_of("a").peer, identity_of("b").peer
Begun = list[tuple[ServerConfig, NetworkConfig]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """What the servers would have been started with."""
    seen: Begun = []

    async def run_server(config: ServerConfig, network: NetworkConfig, _peers: Sequence[str], **_how: Any) -> None:
        seen.append((config, network))

    monkeypatch.setattr(server, "run_server", run_server)
    return seen


def serve(*options: object) -> None:
    assert frame.run(["serve", "MODEL", *map(str, options)]) == 0


def test_the_share_is_kept_for_the_peers_of_the_file_else_for_those_that_are_let_in(
    begun: Begun, tmp_path: Path
) -> None:
    """Nobody whom either list names is cut off for what others of its network do."""
    one, both = tmp_path / "one", tmp_path / "both"
    one.write_text(f"{A}\n")
    both.write_text(f"{A}\n{B}  # a remark\n")
    serve()
    serve("--reserve-for", one)
    serve("--allow", both)
    serve("--allow", both, "--reserve-for", one)
    assert [config.listed for config, _ in begun] == [frozenset(), {A}, {A, B}, {A}]
    assert [network.listed for _, network in begun] == [frozenset(), {A}, {A, B}, {A, B}]
    assert [network.gate.allowed for _, network in begun] == [None, None, {A, B}, {A, B}]


def test_a_server_never_says_its_swarms_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at debug, not where its options are shown whole, not when somebody comes with another key."""
    path = tmp_path / "swarm.key"
    path.write_text(new_key().line())
    path.chmod(0o600)

    async def run_server(config: ServerConfig, network: NetworkConfig, _peers: Sequence[str], **_how: Any) -> None:
        logging.getLogger("corolla.test").debug("begins %r %r", config, network, extra={"gate": network.gate})
        memory, theirs = MemoryNetwork(random.Random(1)), GateConfig(keys=(new_key(),))
        async with memory.transport("ours", gate=network.gate) as ours, memory.transport("other", gate=theirs) as other:
            await ours.serve("/test", lambda stream: stream.close())
            memory.introduce(other, ours)
            with pytest.raises(HopFailed, match="does not prove the swarm key"):
                await other.dial(ours.peer, "/test", timeout_s=30.0)

    monkeypatch.setattr(server, "run_server", run_server)
    for form in ("text", "json"):
        serve("--swarm-key", path, "--log-level", "debug", "--log-format", form)
    said = capsys.readouterr()
    [key] = load_keys([path])
    assert "begins" in said.err
    assert "1 swarm key" in said.err
    for secret in (key.secret.hex(), repr(key.secret), path.read_text()):
        assert secret not in said.out + said.err
