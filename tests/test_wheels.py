"""The distributions as wheels: installed into an environment that knows no checkout, they train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[1]
TINY = ("task.layers=1", "task.width=32", "task.context=32", "task.batch=4", "fragments.count=4", "round.steps=4")


def _run(*command: str | Path, folder: Path) -> str:
    ended = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _installed(what: str, folder: Path) -> Path:
    """Build all wheels, install ``what`` of them into a fresh environment, and return its folder of commands."""
    _run("make", "-s", "wheels", f"DIST={folder / 'dist'}", folder=ROOT)
    _run(sys.executable, "-m", "venv", "venv", folder=folder)
    commands = folder / "venv" / "bin"
    _run(commands / "pip", "install", "-q", "--find-links", "dist", what, folder=folder)
    return commands


@pytest.mark.slow
def test_a_run_of_installed_wheels(tmp_path: Path) -> None:
    diloco = _installed("diloco[all]", tmp_path) / "diloco"
    settings = [word for setting in TINY for word in ("--set", setting)]
    _run(diloco, "up", "--learners", "2", "--tokens", "20000", "--plain", "--run-dir", "run", *settings, folder=tmp_path)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["tokens_processed"] >= 20_000
    assert "everything checked holds" in _run(diloco, "verify", "run", folder=tmp_path)


@pytest.mark.slow
def test_what_services_share_says_alone_what_is_missing(tmp_path: Path) -> None:
    python = _installed("diloco", tmp_path) / "python"
    for words in (("-m", "diloco", "up"), ("-c", "import diloco; diloco.up()")):
        ended = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert "pip install 'diloco[all]'" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_syncer_alone_installs_no_jax(tmp_path: Path) -> None:
    commands = _installed("diloco-syncer", tmp_path)
    assert "--config" in _run(commands / "diloco-syncer", "--help", folder=tmp_path)
    installed = {package["name"] for package in json.loads(_run(commands / "pip", "list", "--format", "json", folder=tmp_path))}
    assert "jax" not in installed
