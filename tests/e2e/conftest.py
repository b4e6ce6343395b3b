"""Server processes over real libp2p on loopback; whatever a test starts ends with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.setup import ONE_THREAD, start_chains
from corolla.apps.demo.processes import Processes
from corolla.client.model import DistributedModelForCausalLM
from corolla.models.testing import write_model_s


@pytest.fixture(scope="session")
def model_s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "s"
    write_model_s(directory)
    return directory


@pytest.fixture(scope="session")
def local_s(model_s: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_s, dtype=torch.float32)


@pytest.fixture(scope="session")
def addresses(model_s: Path) -> Iterator[dict[int, str]]:
    """Swarms of 1, 2 and 4 servers; the address of each."""
    with Processes(ONE_THREAD) as processes:
        yield {chain.num_servers: chain.address for chain in start_chains(processes, model_s, (1, 2, 4))}


@pytest.fixture(scope="session")
def swarm_s(model_s: Path, addresses: dict[int, str]) -> Iterator[dict[int, DistributedModelForCausalLM]]:
    """S on each of these swarms."""
    torch.set_num_threads(1)
    models = {
        count: AutoDistributedModelForCausalLM.from_pretrained(model_s, initial_peers=[address])
        for count, address in addresses.items()
    }
    yield models
    for model in models.values():
        model.close()
