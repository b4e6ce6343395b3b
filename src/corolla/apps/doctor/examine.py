"""All checks in their order: the machine and its files, then the network as far as it comes up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corolla.apps.doctor.machine import check_disk, check_identity, check_key, check_memory, kept_identity
from corolla.apps.doctor.swarm import examine_swarm
from corolla.errors import BadInput, NoPeers
from corolla.ids import PeerId
from corolla.models.disk_cache import user_cache
from corolla.net.findings import Finding
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport

JOIN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server would be started with."""

    join: Sequence[str] = ()
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()
    identity: Path | None = None
    swarm_keys: Sequence[Path] = ()
    allow: Sequence[Path] = ()
    cache_dir: Path | None = None


def examine_machine(
    keys: Sequence[Path], allow: Sequence[Path], *, identity: Path | None, cache_dir: Path | None = None
) -> list[Finding]:
    """What can be said before the network: `corolla serve` begins with it. `cache_dir` None: the user's own cache."""
    key, _ = check_key(keys, allow)
    return [key, check_identity(identity), check_disk(cache_dir or user_cache()), check_memory()]


async def examine(asked: Asked) -> list[Finding]:
    """A finding for each check that could be made. Bounded in time; raises nothing that the user can cure."""
    findings = examine_machine(asked.swarm_keys, asked.allow, identity=asked.identity, cache_dir=asked.cache_dir)
    _, gate = check_key(asked.swarm_keys, asked.allow)
    if gate is None:
        return findings
    try:
        network = NetworkConfig(
            identity=kept_identity(asked.identity),
            listen=tuple(asked.listen),
            announce=tuple(asked.announce),
            gate=gate,
        )
        return findings + await _examine_network(network, asked.join)
    except BadInput as wrong:
        return [*findings, Finding("listen", "bad", str(wrong), "name another address, or end what uses it")]


async def _examine_network(network: NetworkConfig, peers: Sequence[str]) -> list[Finding]:
    async with open_transport(network) as transport:
        listening = Finding("listen", "ok", ", ".join(transport.addresses))
        if not peers:
            nobody = Finding("join", "unsure", "no swarm named: the network was not tried", "pass --join ADDR")
            return [listening, nobody]
        try:
            await transport.join(peers, timeout_s=JOIN_TIMEOUT_S)
        except (NoPeers, BadInput) as fault:
            return [listening, Finding("join", "bad", str(fault), _cure(network, transport.peer))]
        num_met = len(transport.met_peers())
        met = Finding("join", "ok", f"joined the swarm; met {num_met} peer{'' if num_met == 1 else 's'}")
        return [listening, met, *await examine_swarm(transport)]


def _cure(network: NetworkConfig, peer: PeerId) -> str:
    cure = "see whether the peer runs, whether its address is right, whether --swarm-key is its swarm's"
    if network.identity is None:
        return f"{cure}; if it keeps a list of peers (--allow), pass the --identity that is on it"
    return f"{cure}; if it keeps a list of peers (--allow), whether {peer} is on it"
