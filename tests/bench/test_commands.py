"""Each script in ``bench`` explains itself, and pages, docstrings and the Makefile name only commands that there are."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

SCRIPTS = sorted(file.stem for file in BENCH.glob("*.py"))
OLD = re.compile(r"^\| `bench/[^|]*\|")  # the column of old commands in the changelog's table
ELSEWHERE = "at commit"  # a script as it was then
NAMED = re.compile(r"(?P<said>python3? |`|\$\(BIN\)/python )?bench/(?P<name>[a-z_]+)\.py(?P<rest>[^`#;,()\n]*)")


@cache
def parser_of(script: str) -> argparse.ArgumentParser:
    module = importlib.import_module(script)
    made: argparse.ArgumentParser = module.parser() if hasattr(module, "parser") else module.SCRIPT.parser()
    return made


def commands(script: str) -> list[str]:
    """Return the subcommands of a script; one that is empty where there are none."""
    found = [action.choices for action in parser_of(script)._actions if isinstance(action, argparse._SubParsersAction)]
    return [*found[0]] if found else [""]


def named() -> Iterator[tuple[str, str, list[str] | None, bool]]:
    """Yield each place that names a script, its name, and its arguments where it is a command.

    A place that does not begin with `python` may leave out positional arguments.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.py", "Makefile"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for path in listed:
        file = ROOT / path
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
            for found in NAMED.finditer(OLD.sub("", line) if path == "CHANGELOG.md" else line):
                words = shlex.split(re.sub(r"[\[\]\"']", " ", found["rest"])) if found["said"] else []
                is_mention = "python" not in (found["said"] or "")
                if ELSEWHERE not in line[found.end() :]:
                    yield f"{path}:{number}", found["name"], None if is_mention and not words else words, is_mention


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_and_each_of_its_commands_has_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(script):
        with pytest.raises(SystemExit) as ended:
            parser_of(script).parse_args([*filter(None, [command]), "--help"])
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out
    assert f"bench/{script}.py" in (parser_of(script).description or "") or commands(script) == [""]


@pytest.mark.tool
def test_only_commands_that_there_are_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, checked = [], 0
    for place, script, words, is_mention in named():
        if script not in SCRIPTS:
            wrong.append(f"{place}: there is no bench/{script}.py")
        elif words is not None:
            checked += 1
            try:
                parser_of(script).parse_args(words)
            except SystemExit:
                why = capsys.readouterr().err.strip().splitlines()[-1]
                if not (is_mention and "are required" in why):
                    wrong.append(f"{place}: {' '.join(words)}: {why}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert checked > 60
