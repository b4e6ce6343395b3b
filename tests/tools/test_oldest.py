"""`make oldest` installs what pyproject.toml says will do, and fails when it does not."""

import sys
import tomllib
from pathlib import Path

import pytest

import oldest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_every_dependency_has_a_lower_bound_that_is_no_newer_than_what_is_pinned() -> None:
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    bounds = oldest.lower_bounds(PROJECT)
    assert len(bounds) > len(PROJECT["dependencies"])
    for name, version in bounds.items():
        assert numbers(version) <= numbers(pins[name.lower().replace("_", "-")]), name


@pytest.mark.parametrize("requirement", ["torch", "torch==2.13.0", "torch<3", "torch>2"])
def test_a_dependency_without_a_lower_bound_is_named(requirement: str) -> None:
    with pytest.raises(SystemExit, match=requirement):
        oldest.lower_bounds(PROJECT | {"dependencies": [requirement]})


def test_what_is_left_out_is_there() -> None:
    for path in oldest.NOT_HERE:
        assert (ROOT / path).is_file()


@pytest.mark.parametrize(("failing", "code"), [("nothing", 0), ("serve", 1)])
def test_one_failed_check_fails_and_the_others_are_made(
    failing: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({failing!r} in sys.argv)\n")
    python.chmod(0o755)
    assert oldest.try_out(python) == code
    said = capfd.readouterr().out
    assert "• the fast tests" in said
    assert ("failed with the oldest versions: corolla serve --help" in said) == bool(code)
