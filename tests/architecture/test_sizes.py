"""Files under 400 lines, functions under 60."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regrad"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60


def long_functions(text: str) -> list[str]:
    """``name (lines)`` of each function in ``text`` that has 60 lines or more, from its ``def`` to its end."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= MOST_FUNCTION_LINES:
                found.append(f"{node.name} ({lines})")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_sizes(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_FILE_LINES
    assert long_functions(text) == []


def test_a_long_function_is_caught():
    body = "\n".join("    x = 1" for _ in range(MOST_FUNCTION_LINES - 1))
    assert long_functions(f"def short():\n    pass\n\n\ndef long():\n{body}\n") == [f"long ({MOST_FUNCTION_LINES})"]


def test_there_are_files_to_look_at():
    assert len(FILES) > 20


@pytest.mark.parametrize("name", ["torch", "jax", "numpy", "transformers"])
def test_no_test_folder_is_named_after_a_dependency(name):
    # such a folder on sys.path would be imported in place of the package
    assert not list((ROOT / "tests").rglob(f"{name}/"))
