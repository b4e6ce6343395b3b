"""The cache: what is built stands whole and is built once; the cap takes what nobody uses, oldest first."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from corolla.errors import BadInput, SwarmError
from corolla.models.cached_file import CachedFile, Writer
from corolla.models.disk_cache import PARTIAL, DiskCache, build_once, journal_of, user_cache
from corolla.models.locks import try_lock, wait_for_lock


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


# --- the cap


def fill(cache: DiskCache, name: str, num_bytes: int, used_at: float) -> Path:
    """A shard of some repository, last used at that time."""
    file = CachedFile(cache.root / "hub" / "some--thing" / "c0" / name, num_bytes)
    with Writer(file) as writer:
        writer.write(0, b"x" * num_bytes)
        writer.record(0, num_bytes)
    for words in (("hub", "some--thing", "c0"), ("hub", "some--thing", "c0", name)):
        cache.use(*words).close()
        os.utime(cache.lock_path(*words), (used_at, used_at))
    return file.path


def names(cache: DiskCache) -> list[str]:
    return sorted(path.name for path in cache.root.glob("hub/*/*/*.safetensors"))


def test_what_was_used_longest_ago_goes_first_and_no_more_than_must(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1_000_000)
    for age, name in enumerate(["b.safetensors", "c.safetensors", "a.safetensors"]):
        fill(cache, name, 300_000, used_at=1000 + age)
    cache.reserve(350_000, "a thing", lambda: None)
    assert names(cache) == ["a.safetensors", "c.safetensors"]
    assert not journal_of(tmp_path / "hub" / "some--thing" / "c0" / "b.safetensors").exists()


def test_what_somebody_uses_stays_and_when_that_is_too_much_it_is_said(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1_000_000)
    fill(cache, "old.safetensors", 400_000, used_at=1000)
    fill(cache, "new.safetensors", 400_000, used_at=2000)
    repository = ("hub", "some--thing", "c0")
    with cache.use(*repository), cache.use(*repository, "old.safetensors"):
        cache.reserve(400_000, "a thing", lambda: None)
        assert names(cache) == ["old.safetensors"]
        with pytest.raises(BadInput, match=r"a thing does not fit into .*: 1\.\d MB would be in use, at most 1\.0 MB"):
            cache.reserve(700_000, "a thing", lambda: None)
    assert names(cache) == ["old.safetensors"]


def test_a_whole_repository_goes_when_nobody_has_it_open(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=100_000)
    fill(cache, "a.safetensors", 300_000, used_at=1000)
    (tmp_path / "hub" / "some--thing" / "c0" / "tokenizer.json").write_bytes(b"x" * 90_000)
    cache.reserve(50_000, "a thing", lambda: None)
    assert not (tmp_path / "hub" / "some--thing" / "c0").exists()


def test_a_conversion_goes_too_but_not_one_under_way(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=500_000)
    for key in ("done", f"other{PARTIAL}x7"):
        (tmp_path / "gguf" / key).mkdir(parents=True)
        (tmp_path / "gguf" / key / "model.safetensors").write_bytes(b"x" * 300_000)
    with wait_for_lock(tmp_path / "gguf" / "other.lock", timeout_s=1):
        cache.reserve(100_000, "a thing", lambda: None)
    assert [path.name for path in (tmp_path / "gguf").iterdir() if path.is_dir()] == [f"other{PARTIAL}x7"]


def test_without_a_cap_nothing_goes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    fill(cache, "a.safetensors", 300_000, used_at=1000)
    taken: list[int] = []
    cache.reserve(10**15, "a thing", lambda: taken.append(1))
    assert names(cache) == ["a.safetensors"]
    assert taken == [1]


# --- locks


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from corolla.models.locks import try_lock\n"
    hold += "lock = try_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert try_lock(tmp_path / "lock") is None
        with pytest.raises(SwarmError, match="another process has held"):
            wait_for_lock(tmp_path / "lock", timeout_s=0.1)
        holder.kill()
        holder.wait()
        wait_for_lock(tmp_path / "lock", timeout_s=5).close()


def test_shared_locks_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    first, second = (wait_for_lock(tmp_path / "lock", is_shared=True, timeout_s=1) for _ in range(2))
    assert try_lock(tmp_path / "lock") is None
    assert not first.try_make_exclusive()
    second.close()
    assert first.try_make_exclusive()
    assert try_lock(tmp_path / "lock", is_shared=True) is None
    first.close()
