"""What is hosted follows from what is free: all of the model, as many blocks as fit, or what the user says."""

from pathlib import Path
from typing import Any

import pytest

from corolla.errors import BadInput
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.description import CacheNeeds, describe_model
from corolla.models.fingerprint import fingerprint
from corolla.models.testing import write_tiny
from corolla.server import hosting
from corolla.server.config import ServerConfig
from corolla.server.hosting import Host, LoadedSpan, Room, memory_needs
from corolla.server.memory import LEAST_HEADROOM_BYTES

CACHE_TOKENS = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def host_of(checkpoint: Checkpoint, **choices: Any) -> Host:
    config = ServerConfig(model=checkpoint.directory, cache_tokens=CACHE_TOKENS, **choices)
    return Host(config, checkpoint, fingerprint(checkpoint))


def leave_free(checkpoint: Checkpoint, num_blocks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for so many blocks with their cache, beside the headroom."""
    needs = memory_needs(describe_model(checkpoint), CACHE_TOKENS)
    each = max(needs.block_bytes) + CACHE_TOKENS * needs.cache_bytes_per_token
    monkeypatch.setattr(hosting, "free_memory_bytes", lambda _device: LEAST_HEADROOM_BYTES + int(num_blocks * each))


def test_a_model_that_fits_is_hosted_whole(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(checkpoint, 6.5, monkeypatch)
    begun = host_of(checkpoint).begin()
    assert isinstance(begun, LoadedSpan)
    assert (begun.span.start, begun.span.end) == (0, 6)


def test_of_one_that_does_not_as_many_blocks_as_fit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(checkpoint, 3.5, monkeypatch)
    begun = host_of(checkpoint).begin()
    assert isinstance(begun, Room)
    assert (begun.plan.num_blocks, begun.cuts, begun.on_disk) == (3, None, frozenset(range(6)))
    assert begun.expected_speed is None


def test_a_number_of_blocks_is_a_wish_that_must_fit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(checkpoint, 3.5, monkeypatch)
    begun = host_of(checkpoint, num_blocks=2).begin()
    assert isinstance(begun, Room)
    assert begun.plan.num_blocks == 2
    with pytest.raises(BadInput, match="so 3 fit"):
        host_of(checkpoint, num_blocks=4).begin()


def test_a_named_span_is_hosted_whatever_it_takes_and_said_not_to_fit(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosting, "free_memory_bytes", lambda _device: 1000)
    with caplog.at_level("WARNING", logger=hosting.__name__):
        begun = host_of(checkpoint, blocks=(1, 5)).begin()
    assert isinstance(begun, LoadedSpan)
    assert (begun.span.start, begun.span.end) == (1, 5)
    assert "would not fit" in caplog.text


def test_a_server_tells_the_bytes_that_it_read_for_its_span(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    about = describe_model(checkpoint)
    with caplog.at_level("INFO", logger=hosting.__name__):
        host_of(checkpoint).load(1, 4)
    (told,) = [vars(record)["read_bytes"] for record in caplog.records if record.msg == "span loaded"]
    assert told == sum(about.block_download_bytes[1:4])


def test_a_span_and_a_number_of_blocks_exclude_each_other(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadInput, match="leave --num-blocks out"):
        host_of(checkpoint, blocks=(0, 2), num_blocks=2)


def test_what_was_measured_here_is_what_the_next_start_expects(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = host_of(checkpoint).load(2, 4)
    leave_free(checkpoint, 2.5, monkeypatch)
    assert host_of(checkpoint).find_room().expected_speed == loaded.speed


def test_borders_that_cannot_be_cut_are_handed_on(tmp_path: Path) -> None:
    shares = open_checkpoint(write_tiny(tmp_path / "shares", "gemma3n_text", num_kv_shared_layers=2))
    assert host_of(shares).find_room().cuts == {1, 2}


def test_what_a_row_costs_is_spread_over_a_usual_session() -> None:
    assert hosting._cache_bytes_per_token(CacheNeeds(100, 0, None)) == 100  # pyright: ignore[reportPrivateUsage]
    recurrent = CacheNeeds(0, 2048 * 50, None)
    assert hosting._cache_bytes_per_token(recurrent) == 50  # pyright: ignore[reportPrivateUsage]
    windowed = CacheNeeds(100, 0, 512)
    assert hosting._cache_bytes_per_token(windowed) == 25  # pyright: ignore[reportPrivateUsage]
