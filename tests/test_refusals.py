"""Every refusal says what was asked for and what is allowed: people, and programs, act on the two."""

import ast
from pathlib import Path

import corolla

SOURCE = Path(corolla.__file__).parent
KINDS = {"CacheFull", "Overloaded", "Unsupported"}


def test_every_refusal_is_raised_with_value_and_bound() -> None:
    made = 0
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if not any(f"{kind}(" in text for kind in KINDS):  # parsing all of them takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in KINDS:
                continue
            made += 1
            told = {keyword.arg for keyword in node.keywords}
            assert {"value", "bound"} <= told, f"{path.relative_to(SOURCE)}:{node.lineno}: {node.func.id} of what?"
    assert made > 10
