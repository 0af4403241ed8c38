"""The Makefile lists its targets, and says of each step of its setup what came of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEP = ROOT / "requirements" / "setup-step"
PACKAGES = ".venv/lib/python3.11/site-packages"


def targets() -> list[str]:
    [line] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return sorted(line.split())


def step(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STEP, "a step", command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.tool
def test_help_has_a_line_for_every_target() -> None:
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = dict(line.split(None, 1) for line in said.stdout.splitlines())
    assert sorted(lines) == targets()
    assert len(lines) == len(said.stdout.splitlines())


@pytest.mark.tool
@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("true", "done in"),
        (f"mkdir -p {PACKAGES}/one.dist-info", "done, 1 package in"),
        (f"mkdir -p {PACKAGES}/one.dist-info {PACKAGES}/two.dist-info", "done, 2 packages in"),
        ("echo much, and on stderr, too; echo more >&2", "done in"),
    ],
)
def test_a_step_is_one_line_that_ends_in_its_result(tmp_path: Path, command: str, result: str) -> None:
    ended = step(tmp_path, command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(rf"a step \.+ {result} \d+ s\n", ended.stdout)


@pytest.mark.tool
def test_a_step_that_fails_ends_with_what_its_command_printed_and_its_code(tmp_path: Path) -> None:
    ended = step(tmp_path, "echo no such package; exit 3")
    assert (ended.returncode, ended.stderr) == (3, "no such package\n")
    assert re.fullmatch(r"a step \.+ failed after \d+ s\n", ended.stdout)
