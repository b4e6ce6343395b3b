"""Run directories: private, and cleared of what killed processes left behind."""

import os
import stat
import time
from pathlib import Path

import pytest

from corolla.errors import BadInput
from corolla.net.libp2p.rundir import run_dir


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3600,) * 2)


def test_a_run_directory_is_ours_alone_and_ends_with_its_use(tmp_path: Path) -> None:
    with run_dir(tmp_path / "base") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        (path / "socket").touch()
    assert not path.exists()


def test_what_a_dead_process_left_is_cleared(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    dead = tmp_path / "4711-deadbeef"
    dead.mkdir()
    (dead / "control").touch()
    make_old(dead)
    with run_dir(tmp_path):
        assert not dead.exists()


def test_what_a_living_process_uses_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with run_dir(tmp_path) as living:
        make_old(living)
        with run_dir(tmp_path):
            assert living.is_dir()


def test_a_directory_that_is_just_being_made_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    fresh = tmp_path / "4711-cafe"
    fresh.mkdir()
    with run_dir(tmp_path):
        assert fresh.is_dir()


def test_a_place_open_to_others_is_refused_with_the_cure(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match=f"chmod 700 {tmp_path}"), run_dir(tmp_path):
        pass


def test_a_place_that_somebody_else_made_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(BadInput), run_dir(tmp_path / "link"):
        pass


def test_a_place_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="file"), run_dir(tmp_path / "file" / "base"):
        pass
