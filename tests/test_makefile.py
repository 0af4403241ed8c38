"""The Makefile lists its targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def targets() -> list[str]:
    [line] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return sorted(line.split())


@pytest.mark.tool
def test_help_has_a_line_for_every_target() -> None:
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = dict(line.split(None, 1) for line in said.stdout.splitlines())
    assert sorted(lines) == targets()
    assert len(lines) == len(said.stdout.splitlines())
