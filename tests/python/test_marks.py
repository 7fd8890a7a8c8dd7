"""GPU tests that go wrong beside others are marked ``alone``: tests/side_by_side.py runs them last, by themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers import ROOT

FILES = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def looks_at_the_whole_gpu(function: ast.FunctionDef) -> str:
    """Why a test cannot run beside others, or "": it measures time, or reads how much memory the GPU has left."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="Stopwatch")):
                return "measures time"
            case (
                ast.Call(func=ast.Name(id="free_bytes"))
                | ast.Subscript(value=ast.Call(func=ast.Attribute(attr="mem_get_info")), slice=ast.Constant(value=0))
            ):
                return "reads the GPU's free memory"
    return ""


def is_marked(statements: list[ast.stmt] | list[ast.expr]) -> bool:
    return any(ast.unparse(statement).startswith(("pytest.mark.alone", "pytestmark =")) for statement in statements)


def unmarked(source: str) -> list[str]:
    tree = ast.parse(source)
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytest.mark.alone" in ast.unparse(node)]
    if is_marked(marks):
        return []
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [
        f"{test.name}: {why}"
        for test in tests
        if (why := looks_at_the_whole_gpu(test)) and not is_marked(test.decorator_list)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_needs_the_gpu_alone_is_marked(file: Path) -> None:
    assert unmarked(file.read_text()) == []


def test_what_is_not_marked_is_found() -> None:
    body = "    free = torch.cuda.mem_get_info()[0]\n"
    assert unmarked("def test_one():\n" + body) == ["test_one: reads the GPU's free memory"]
    assert unmarked("def test_one():\n    with Stopwatch() as watch: pass\n") == ["test_one: measures time"]
    assert unmarked("@pytest.mark.alone\ndef test_one():\n" + body) == []
    assert unmarked("pytestmark = pytest.mark.alone\ndef test_one():\n" + body) == []
    assert unmarked("def test_one():\n    total = torch.cuda.mem_get_info()[1]\n") == []
