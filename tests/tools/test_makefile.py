"""`make install` gets the build of torch that was asked for, whichever there is, and later runs leave it alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    return tmp_path


def say_what_make_does(checkout: Path, *arguments: str, installed: str | None = None) -> str:
    """Without doing it; `installed`: the index that torch came from."""
    if installed is not None:
        (checkout / ".venv" / ".installed").write_text(f"index={installed}\n")
    command = ["make", "--dry-run", *arguments]
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin:/opt/homebrew/bin"}  # with no TORCH_INDEX, no MAKEFLAGS
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True).stdout


def test_cuda_is_installed_over_the_cpu_build_and_remembered(checkout: Path) -> None:
    done = say_what_make_does(checkout, "install", "TORCH_INDEX=", installed=CPU)
    (torch,) = (line for line in done.splitlines() if "torch==" in line)
    assert "--force-reinstall" in torch
    assert "--index-url" not in torch
    assert "--no-index" not in torch, "a wheelhouse has the CPU build"
    assert 'echo "index=" > .venv/.installed' in done


@pytest.mark.parametrize("index", ["", CPU])
def test_what_is_there_stays_when_nothing_else_is_asked_for(index: str, checkout: Path) -> None:
    assert say_what_make_does(checkout, "demo", installed=index) == ".venv/bin/corolla demo\n"


def test_cuda_stays_when_other_versions_are_asked_for(checkout: Path) -> None:
    (checkout / ".venv" / ".installed").write_text("index=\n")
    (checkout / "Makefile").write_text((ROOT / "Makefile").read_text() + "\n.PHONY: constraints.txt\n")
    done = say_what_make_does(checkout, "install")
    assert "torch==" in done
    assert "whl/cpu" not in done


def test_a_first_install_takes_the_cpu_build(checkout: Path) -> None:
    done = say_what_make_does(checkout, "install")
    assert f"--index-url {CPU}" in done
    assert f'echo "index={CPU}" > .venv/.installed' in done
