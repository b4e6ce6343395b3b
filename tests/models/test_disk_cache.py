"""The cache: what stands in it is whole, and is built once however many want it."""

import threading
import time
from pathlib import Path

import pytest

from corolla.models.disk_cache import build_once, user_cache


def quiet(_sentence: str) -> None:
    pass


def test_it_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / "file").write_text("content")

    for _ in range(2):
        built = build_once(tmp_path / "deep" / "thing", build, quiet)
        assert (built / "file").read_text() == "content"
    assert len(calls) == 1


def test_two_at_once_build_it_once_and_both_get_it(tmp_path: Path) -> None:
    calls: list[Path] = []
    said: list[str] = []
    results: list[str] = []

    def build(directory: Path) -> None:
        calls.append(directory)
        time.sleep(0.3)
        (directory / "file").write_text("content")

    def want() -> None:
        results.append((build_once(tmp_path / "thing", build, said.append) / "file").read_text())

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert results == ["content"] * 3
    assert len(calls) == 1
    assert len(said) == 2
    assert "waiting for it" in said[0]


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        build_once(tmp_path / "thing", fail, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    assert build_once(tmp_path / "thing", lambda directory: (directory / "x").touch(), quiet).is_dir()


def test_what_a_killed_build_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "thing.partial-dead").mkdir()
    (tmp_path / "thing.partial-dead" / "half").write_text("half")
    build_once(tmp_path / "thing", lambda directory: (directory / "x").touch(), quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "corolla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache().is_relative_to(tmp_path)
    assert user_cache().name == "corolla"
