"""Tiny checkpoints, written once a session, and the whole model to compare with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.testing import write_tiny

torch.set_num_threads(1)  # two shared cores: two threads a test make tiny steps ten times slower


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """The tiny random checkpoint of a family."""
    written: dict[str, Path] = {}

    def checkpoint(family: str) -> Checkpoint:
        if family not in written:
            written[family] = write_tiny(tmp_path_factory.mktemp(family), family)
        return open_checkpoint(written[family])

    return checkpoint


@pytest.fixture(scope="session")
def whole() -> Callable[..., PreTrainedModel]:
    """The whole model, as transformers itself loads it."""

    def model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=dtype).eval()

    return model
