"""From the shared network options to the network's own configuration. Imports the network, so not for `--help`."""

from collections.abc import Sequence
from pathlib import Path

import click

from corolla.apps.cli.settings import RunSettings
from corolla.client.lists import ServerLists, read_lists
from corolla.net.gate import GateConfig, load_allowed
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.swarm_key import load_keys

JOIN_TIMEOUT_S = 30.0
"""How long a serving peer tries the addresses of `--join`; a restarting bootstrap peer is back within that."""


def server_network(*, listen: Sequence[str], announce: Sequence[str], identity: Path | None) -> NetworkConfig:
    """A peer that others reach and that keeps its part of the hash table."""
    return NetworkConfig(identity=identity, listen=tuple(listen), announce=tuple(announce), gate=chosen_gate())


def client_network() -> NetworkConfig:
    """A peer that only asks: under the identity of `--identity`, or a new one each time."""
    return NetworkConfig(is_client=True, identity=_settings().identity, gate=chosen_gate())


def chosen_gate() -> GateConfig:
    """What `--swarm-key` and `--allow` of the running command say. Raises BadInput for a file that cannot be used."""
    keys, allow = chosen_gate_files()
    return GateConfig(keys=load_keys(keys), allowed=load_allowed(allow))


def chosen_gate_files() -> tuple[Sequence[Path], Sequence[Path]]:
    """The files that `--swarm-key` and `--allow` of the running command name."""
    settings = _settings()
    return settings.swarm_keys, settings.allow


def chosen_servers() -> ServerLists:
    """What `--allow-server`, `--block-server` and `--quant` say. Raises BadInput for what is no peer id."""
    settings = _settings()
    return read_lists(settings.allow_servers or None, settings.block_servers, settings.server_quantization)


def is_exact() -> bool:
    """Whether `--exact` was given."""
    return _settings().exact


def _settings() -> RunSettings:
    context = click.get_current_context(silent=True)
    settings = context.find_root().obj if context is not None else None
    return settings if isinstance(settings, RunSettings) else RunSettings()
