"""No import asserts a version: users of the predecessor could not import it beside a newer library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import corolla

SOURCE = Path(corolla.__file__).parent
SAYS_VERSION = {"__version__", "version", "version_info", "VERSION"}


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs: of the module, of its classes, and of what branches there."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        for _, inner in ast.iter_fields(node):
            if isinstance(inner, list):
                yield from _run_at_import([part for part in inner if isinstance(part, ast.stmt)])
                for handler in (part for part in inner if isinstance(part, ast.ExceptHandler)):
                    yield from _run_at_import(handler.body)


def _names(node: ast.AST) -> set[str]:
    named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return named | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def refusals(text: str) -> list[int]:
    """Lines at which an import may fail for a version: it asserts one, or raises behind a question for one."""
    lines: list[int] = []
    for node in _run_at_import(ast.parse(text).body):
        if isinstance(node, ast.Assert) and SAYS_VERSION & _names(node.test):
            lines.append(node.lineno)
        if isinstance(node, ast.If) and SAYS_VERSION & _names(node.test):
            inside = _run_at_import([*node.body, *node.orelse])
            lines += [part.lineno for part in inside if isinstance(part, ast.Raise)]
    return lines


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nassert torch.__version__ >= '2'",
        "from importlib.metadata import version\nif version('hivemind') != '1.1.12':\n  raise ImportError",
        "class A:\n  try:\n    assert 4 <= transformers.version.major\n  except ValueError: pass",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    assert refusals(text)


def test_no_import_asserts_a_version() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in SAYS_VERSION):  # parsing all of them takes seconds
            assert refusals(text) == [], path
