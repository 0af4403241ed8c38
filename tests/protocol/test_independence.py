"""The references were written from ``docs/protocol.md`` alone: they import nothing of this project."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", ["make_golden", "delta_reference", "make_delta", "smallest_learner"])
def test_it_imports_nothing_of_the_project(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in imported if module.startswith("diloco")]
    assert {module for module in imported if module.startswith("tests")} <= {
        "tests.protocol.make_golden",
        "tests.protocol.delta_reference",
    }
