"""`AutoDistributedModelForCausalLM`: the public door. Imports neither torch nor transformers by itself.

`from_pretrained` starts the network first and imports the heavy libraries while the daemon comes up and dials:
importing torch and a model file of transformers takes longer than everything else until the first token.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.client.config import ClientConfig
from corolla.client.connection import Connection
from corolla.client.lists import read_lists
from corolla.errors import BadInput
from corolla.models.disk_cache import Say
from corolla.models.frugal import give_back_freed, give_back_library_pages, import_modeling
from corolla.models.source import open_model_source
from corolla.models.source_options import SourceOptions
from corolla.models.transfer import Progress, TellSometimes
from corolla.net.gate import GateConfig
from corolla.net.libp2p.addresses import parse_peer_address
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.swarm_key import load_keys

if TYPE_CHECKING:
    import torch

    from corolla.client.model import DistributedModelForCausalLM

log = logging.getLogger(__name__)

PEERS_VARIABLE = "COROLLA_PEERS"


class AutoDistributedModelForCausalLM:
    """Makes a `transformers` model whose blocks run on a swarm."""

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModelForCausalLM.from_pretrained(name_or_dir, initial_peers=[…])")

    @staticmethod
    def from_pretrained(
        name_or_dir: str | os.PathLike[str],
        *,
        initial_peers: Sequence[str] | str | None = None,
        dtype: "torch.dtype | str | None" = None,
        config: ClientConfig | None = None,
        network: NetworkConfig | None = None,
        model_name: str | None = None,
        source: SourceOptions | None = None,
        swarm_key: str | os.PathLike[str] | None = None,
        allowed_servers: Sequence[str] | None = None,
        blocked_servers: Sequence[str] | None = None,
        quantization: str = "any",
        exact: bool = False,
        has_tokenizer: bool = False,
        progress: Progress | None = None,
        say: Say | None = None,
        **unknown: Any,
    ) -> "DistributedModelForCausalLM":
        """Load embeddings, final norm and head; the blocks are found in the swarm.

        `initial_peers`: addresses of any peers of the swarm (`/ip4/…/tcp/…/p2p/…`); left out, the environment
        variable COROLLA_PEERS, separated by commas or spaces. `dtype`: of the local half and of what is sent;
        None keeps the checkpoint's own. `source`: revision, token and cache of a hub's OWNER/NAME; `has_tokenizer`
        also gets the files of its tokenizer. `swarm_key`: the key file of a private swarm. `allowed_servers`,
        `blocked_servers`: peer ids of the only servers to use, and of those never to use. `quantization`: "none" for
        servers alone that hold the weights as they are. `exact`: bit for bit the same text when servers are lost, in
        every dtype. `progress` is told how a download goes, `say` in a sentence what else takes long (converting a
        GGUF file); None: the log is. Raises BadInput (model, arguments) or NoPeers.
        """
        if unknown:
            raise BadInput(f"from_pretrained does not know {', '.join(sorted(unknown))}")
        peers = resolve_peers(initial_peers)
        for peer in peers:
            parse_peer_address(peer)
        config = config or ClientConfig()
        if allowed_servers is not None or blocked_servers is not None or quantization != "any":
            config = replace(config, servers=read_lists(allowed_servers, blocked_servers, quantization))
        if exact:
            config = replace(config, exact=True)
        if network is None:
            keys = load_keys([] if swarm_key is None else [Path(swarm_key)])
            network = NetworkConfig(is_client=True, gate=GateConfig(keys=keys))
        checkpoint = open_model_source(
            name_or_dir, source or SourceOptions(), has_tokenizer=has_tokenizer,
            progress=progress or TellSometimes(log.info), say=say or log.info,
        )  # fmt: skip
        connection = Connection(network, config, peers)
        try:
            import_modeling()
            from corolla.client.model import load_distributed_model

            model = load_distributed_model(checkpoint, connection, dtype=dtype, model_name=model_name)
            give_back_freed()
            give_back_library_pages()
            return model
        except BaseException:
            connection.close()
            raise


def resolve_peers(initial_peers: Sequence[str] | str | None) -> list[str]:
    """The addresses to join, from the argument or the environment. Raises BadInput when there are none."""
    if initial_peers is None:
        initial_peers = os.environ.get(PEERS_VARIABLE, "")
    if isinstance(initial_peers, str):
        initial_peers = initial_peers.replace(",", " ").split()
    peers = [peer for peer in initial_peers if peer]
    if not peers:
        raise BadInput(
            "no peers to join: pass initial_peers=['/ip4/…/tcp/…/p2p/…'] (a server or `corolla bootstrap` prints "
            f"its address when it is ready), or set the environment variable {PEERS_VARIABLE}"
        )
    return peers
