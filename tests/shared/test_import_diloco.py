"""``import diloco``: its functions are visible to people and editors, though other distributions have them."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import diloco

STUB = Path(diloco.__file__).with_suffix(".pyi")


def test_its_functions_are_listed() -> None:
    functions = {point.name for point in entry_points(group="diloco.api")}
    assert functions == {"join", "open", "up"}
    assert functions <= set(dir(diloco))
    assert set(diloco.__all__) == functions | {"__version__"}


def test_an_editor_sees_the_functions_that_a_program_gets() -> None:
    typed = {
        name.asname: (node.module, name.name)
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    points = entry_points(group="diloco.api")
    assert typed == {point.name: (point.module, point.attr) for point in points}


@pytest.mark.tool
def test_to_look_at_the_module_imports_nothing_of_other_distributions() -> None:
    program = "import sys, diloco; dir(diloco); print(*(name for name in sys.modules if name.startswith('diloco_')))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []
