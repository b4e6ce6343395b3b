"""What `import corolla` gives, and what it costs."""

import ast
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import corolla

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "hivemind", "numpy", "msgspec", "uvloop", "cryptography", "google"}


def test_all_is_sorted_and_every_name_is_there() -> None:
    assert corolla.__all__ == sorted(corolla.__all__)
    for name in corolla.__all__:
        assert getattr(corolla, name) is not None


def test_every_lazy_name_is_public_and_nothing_else_is_found() -> None:
    tree = ast.parse(Path(corolla.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported - {"TYPE_CHECKING"} == set(corolla.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        corolla.nonesuch  # noqa: B018


def test_the_version_is_the_packages() -> None:
    said = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{corolla.__version__}"\n' in said


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import corolla", set()),
        ("from corolla import AutoDistributedModelForCausalLM", HEAVY - {"torch", "transformers", "hivemind"}),
    ],
)
def test_importing_brings_neither_torch_nor_hivemind(statement: str, allowed: set[str]) -> None:
    script = f"{statement}; import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert not set(json.loads(done.stdout)) & (HEAVY - allowed)


BUILD = """
import sys
from setuptools import build_meta

directory = sys.argv[1]
print(build_meta.build_wheel(directory), build_meta.build_sdist(directory))
"""


@pytest.mark.slow
def test_what_is_built_carries_types_licence_and_nothing_of_the_tests(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "src" / "corolla", copy / "src" / "corolla", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=250, check=True)
    wheel, sdist = done.stdout.splitlines()[-1].split()
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        packed = archive.namelist()
    with tarfile.open(tmp_path / sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert {"corolla/py.typed", "corolla/apps/cli/main.py"} <= set(packed)
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert not [name for name in packed if name.startswith(("tests", "src", "examples"))]
    assert {"src/corolla/py.typed", "README.md", "LICENSE"} <= source
