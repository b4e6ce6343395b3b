"""`--identity` of commands that only ask: servers that keep a list of peers know them by it."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from corolla.apps.cli import conversation
from corolla.apps.cli import main as frame
from corolla.apps.gateway import serving
from corolla.errors import SwarmError
from corolla.net.libp2p import transport as libp2p
from corolla.net.libp2p.config import NetworkConfig

COMMANDS = {
    "generate": ["generate", "MODEL", "a prompt"],
    "chat": ["chat", "MODEL"],
    "gateway": ["gateway", "MODEL"],
    "status": ["status"],
    "route": ["route", "MODEL"],
}


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> list[NetworkConfig]:
    """As what the commands would have gone into the network; there they end."""
    seen: list[NetworkConfig] = []

    def note(*args: Any, **kwargs: Any) -> NoReturn:
        seen.append(next(value for value in (*args, *kwargs.values()) if isinstance(value, NetworkConfig)))
        raise SwarmError("far enough")

    monkeypatch.setattr(libp2p, "open_transport", note)
    monkeypatch.setattr(serving, "run_gateway", note)
    monkeypatch.setattr(conversation.AutoDistributedModelForCausalLM, "from_pretrained", note)
    return seen


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_asks_keeps_the_id_in_its_file_and_has_a_new_one_without(
    command: list[str], networks: list[NetworkConfig], tmp_path: Path
) -> None:
    ending = ["--join", "/ip4/127.0.0.1/tcp/1/p2p/x"]
    for options in (["--identity", str(tmp_path / "key")], []):
        assert frame.run([*command, *ending, *options]) == SwarmError.exit_code
    assert [network.identity for network in networks] == [tmp_path / "key", None]
    assert all(network.is_client for network in networks)
