"""A framework that a distribution of its own adds: a run of its task, from the check to the evaluation of what it trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.made.fixtures import Diloco
from tests.made.third_framework import install


@pytest.mark.slow
def test_a_run_of_a_framework_of_another_distribution(diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    seen = diloco("check", "of_third.py", "--set", "fragments.count=2")
    assert seen.code == 0, seen.err
    assert "\nframework: third, here on abacus\n" in seen.out
    settings = [part for key in ("task.name=of_third:make", "fragments.count=2") for part in ("--set", key)]
    ended = diloco("up", "--run-dir", "run", "--learners", "2", "--tokens", "1200", "--plain", *settings)
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["framework"] == "third"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["tokens_processed"] >= 1200
    assert diloco("export", "run", "weights.safetensors").code == 0
    evaluated = diloco("eval", "weights.safetensors")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.out.startswith("loss ")
