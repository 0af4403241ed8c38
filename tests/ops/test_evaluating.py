"""``diloco eval`` and ``diloco sample``: wrong files and options, before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco.errors import DilocoError, RunError, SettingsError
from diloco_ops.weights import evaluating
from diloco_ops.weights.evaluating import task_of
from diloco_ops.weights.export import TASK

TENSORS = {"w": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["nowhere"], RunError, "nowhere: not a run's directory"),
        (["text"], SettingsError, "text: cannot be read as a safetensors file of weights"),
        (["bare"], SettingsError, "bare: does not state its task"),
        (["odd"], SettingsError, "odd: cannot be read as a safetensors file of weights: its diloco_task is '3'"),
        (["other"], SettingsError, "other: no setting 'task.wide'"),
        (["file", "--version", "3"], SettingsError, "--version and --average require a run's directory"),
        (["file", "--average", "2"], SettingsError, "--version and --average require a run's directory"),
        (["file", "--version", "new"], SettingsError, "'new': expected a number, a percentage such as 50%, or latest"),
        (["file", "--version", "101%"], SettingsError, "--version '101%': expected at most 100%"),
        (["file", "--version", "50%"], SettingsError, "--version and --average require a run's directory"),
        (["file", "--set", "inner.beta1=0.5"], SettingsError, "of a file only its task can be set"),
        (["file", "--set", "task.width=7"], SettingsError, "width"),
        (["folder", "--set", "task.width=8"], SettingsError, "a run has its own settings: --set is for a file"),
        (["file", "--data", "nowhere"], DilocoError, "--data nowhere: there is no such file or folder"),
    ],
)
def test_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], kind: type[DilocoError], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("no tensors")
    save_file(TENSORS, "bare")
    for name, task in (("file", '{"name": "gpt"}'), ("odd", "3"), ("other", '{"wide": 3}')):
        save_file(TENSORS, name, {TASK: task})
    weights, *options = arguments
    given = dict(zip((option.removeprefix("--") for option in options[::2]), options[1::2], strict=True))
    asked = evaluating.EvaluationRequest(
        Path(weights),
        given.get("version", "latest"),
        int(given.get("average", 1)),
        given.get("data"),
        [given["set"]] if "set" in given else [],
    )
    with pytest.raises(kind) as error:
        evaluating.result(asked, None)
    assert said in str(error.value)


def test_the_task_is_the_files_with_what_is_set(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file", {TASK: '{"width": 32, "heads": 2}'})
    settings = task_of(tmp_path / "file", ["task.layers=1"])
    assert (settings.task.width, settings.task.heads, settings.task.layers) == (32, 2, 1)
