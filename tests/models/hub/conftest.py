"""A hub on loopback, a model in it, and the way a user opens it; impatient, so that failures take milliseconds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corolla.models.checkpoint import Checkpoint
from corolla.models.hub import HubConfig
from corolla.models.source import open_source
from corolla.models.testing_hub import LocalHub, run_local_hub

NAME = "someone/tiny"


@pytest.fixture
def hub(tiny: Callable[[str], Checkpoint]) -> Iterator[LocalHub]:
    """A hub with a tiny llama in five shards."""
    with run_local_hub() as running:
        running.repositories[NAME] = tiny("llama").directory
        yield running


@pytest.fixture
def impatient(hub: LocalHub) -> HubConfig:
    return HubConfig(
        endpoint=hub.endpoint, connections=3, piece_bytes=50_000, attempts=3, first_pause_s=0.01, read_timeout_s=5
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_here(impatient: HubConfig, cache: Path) -> Callable[..., Checkpoint]:
    """Opens the tiny llama from the hub."""

    def opened(name: str = NAME, **options: object) -> Checkpoint:
        arguments = {"cache_dir": cache, "hub": impatient, **options}
        return open_source(name, **arguments)  # type: ignore[arg-type]

    return opened
