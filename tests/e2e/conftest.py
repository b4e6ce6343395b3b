"""Real processes over libp2p on loopback; whatever a test starts ends with it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.setup import ONE_THREAD, start_chains
from corolla.apps.processes import Processes
from corolla.apps.warm import WarmStart
from corolla.client.model import DistributedModelForCausalLM
from corolla.models.testing import write_model_s, write_tiny

COMMAND = [sys.executable, "-m", "corolla"]
ENVIRONMENT = {**os.environ, **ONE_THREAD}
TIMEOUT_S = 200

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts processes that have imported torch already; demos and what runs elsewhere start from nothing."""
    with WarmStart() as warm:
        yield warm


@pytest.fixture(scope="session")
def corolla(warm: WarmStart) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one command line to its end."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *map(str, arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with warm.popen(command, text=True, env=ENVIRONMENT | environment, **pipes) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def running(warm: WarmStart) -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """Starts one command line (or, given a list, any command) and ends it with the block, if it has not ended."""

    @contextmanager
    def start(*arguments: object) -> Iterator[subprocess.Popen[str]]:
        command = arguments[0] if isinstance(arguments[0], list) else [*COMMAND, *map(str, arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with warm.popen(command, text=True, env=ENVIRONMENT, **pipes) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    return start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Path:
    """A random llama of six blocks, in five shards, with a tokenizer of the words `w5` … `w127`."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory, "llama")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def model_s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "s"
    write_model_s(directory)
    return directory


@pytest.fixture(scope="module")
def local_s(model_s: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_s, dtype=torch.float32)


@pytest.fixture(scope="module")
def addresses(model_s: Path, warm: WarmStart) -> Iterator[dict[int, str]]:
    """Swarms of 1, 2 and 4 servers; the address of each."""
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        yield {
            chain.num_servers: chain.address for chain in start_chains(processes, model_s, (1, 2, 4), let_record=False)
        }


@pytest.fixture(scope="module")
def swarm_s(model_s: Path, addresses: dict[int, str]) -> Iterator[dict[int, DistributedModelForCausalLM]]:
    """S on each of these swarms."""
    models = {
        count: AutoDistributedModelForCausalLM.from_pretrained(model_s, initial_peers=[address])
        for count, address in addresses.items()
    }
    yield models
    for model in models.values():
        model.close()
