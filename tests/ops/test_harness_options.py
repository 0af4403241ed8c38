"""``--eval``: which tasks, by which program, and how results are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.errors import DilocoError, SettingsError
from diloco_ops.finetune import harness


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "bin" / "lm_eval"
    found.parent.mkdir()
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent))
    return found


def test_tasks_and_arguments_are_those_of_the_options(program: Path) -> None:
    assert harness.asked(None, 30.0, None) is None
    request = harness.asked("lm_eval:sums,colours", 0.5, "--include_path 'my tasks' --limit 7")
    assert request is not None
    assert (request.tasks, request.every_s, request.program) == ("sums,colours", 30.0, str(program))
    assert request.arguments == ["--include_path", "my tasks", "--limit", "7"]


@pytest.mark.parametrize(
    ("tasks", "arguments", "said"),
    [
        (None, "--limit 7", "--eval-args --limit 7: needs --eval lm_eval:TASKS"),
        ("arc_easy", None, "--eval arc_easy: expected lm_eval:TASK,TASK"),
        ("lm_eval:", None, "--eval lm_eval:: expected lm_eval:TASK,TASK"),
        ("lm_eval:sums", "--device cuda", "--eval-args --device cuda: --device is given by diloco; leave it out"),
        ("lm_eval:sums", "--tasks=all", "--tasks=all is given by diloco"),
    ],
)
def test_other_forms_are_refused(program: Path, tasks: str | None, arguments: str | None, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        harness.asked(tasks, 30.0, arguments)
    assert said in str(caught.value)


def test_without_the_library_it_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(DilocoError, match="--eval lm_eval:sums: not installed: lm_eval; pip install lm_eval"):
        harness.asked("lm_eval:sums", 30.0, None)


def test_the_newest_results_are_shown(tmp_path: Path) -> None:
    assert harness.result_lines(tmp_path) == []
    lines = [
        {"tokens": 10, "budget": 100, "results": {"sums": {"acc": 0.25}}},
        {"tokens": 50, "budget": 100, "results": {"sums": {"acc": 0.5, "acc_norm": 0.75}}},
    ]
    (tmp_path / harness.RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert harness.result_lines(tmp_path) == ["lm_eval after 50 % of the tokens: sums acc 0.500, acc_norm 0.750"]
    (tmp_path / harness.RESULTS).write_text("{")
    assert harness.result_lines(tmp_path) == []
