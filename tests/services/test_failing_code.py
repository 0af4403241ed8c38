"""Errors of a task's own code that come in mid-run, in a run of ``diloco up``: who ends by them, and what is said."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from tests.made.fixtures import Diloco, Ended

TASK = """
import itertools
import jax.numpy as jnp
import numpy as np

class Mine:
    tokens_per_batch, evaluate_every_s, calls = 8, 0.1, 0
    def init(self, key): return {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}
    def loss(self, params, batch): return jnp.mean((batch @ params["w"].T + params["b"] - batch) ** 2)
    def batches(self, share, shares, seed, start):
        for number in itertools.count(start):
            if number == 100: raise OSError("part 100 is damaged")
            yield np.random.default_rng((share, number)).normal(size=(8, 4)).astype(np.float32)
    def validation(self): return [np.eye(4, dtype=np.float32)]
    def evaluate(self, params):
        self.calls += 1  # of a process; it fails from the second one on
        return {"score": 1 / (2 - min(self.calls, 2))}

def make(settings, data): return Mine()
"""
SETTINGS = ("fragments.count=2", "round.steps=8", "shards=1", "learners=2", "tokens=4800", "task.name=failing:make")


def place(file: Path, text: str) -> str:
    """Return the line of a file that holds a text, as errors end with it."""
    lines = file.read_text().splitlines()
    return f"({file}, line {next(number for number, line in enumerate(lines, 1) if text in line)})"


def up(diloco: Diloco, folder: Path, text: str, patch: pytest.MonkeyPatch) -> tuple[Ended, Path]:
    """Train this task to the run's end; return the command's end and the task's file."""
    file = folder / "failing.py"
    file.write_text(text)
    patch.setenv("PYTHONPATH", str(folder))
    return diloco("up", "--plain", "--run-dir", "mine", *(word for setting in SETTINGS for word in ("--set", setting))), file


@pytest.mark.slow  # the feed has tests of its own; this is the error's way to the command
def test_an_error_in_the_data_ends_a_run(diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, file = up(diloco, tmp_path, TASK, monkeypatch)
    assert ended.code == 2
    said = f": task.name = 'failing:make': OSError: part 100 is damaged {place(file, 'raise OSError')}\n"
    assert ended.err in [f"diloco: learner-{number}{said}" for number in range(2)]


@pytest.mark.slow  # a whole `up`; the evaluator's own end is in tests/learner/test_evaluator.py
def test_an_error_in_the_evaluation_does_not_end_a_run(diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, file = up(diloco, tmp_path, TASK.replace("number == 100", "number == -1"), monkeypatch)
    failure = f"task.name = 'failing:make': ZeroDivisionError: division by zero {place(file, '1 / (2')}"
    assert (ended.code, ended.err) == (2, f"diloco: evaluator: {failure}\n")
    run = tmp_path / "mine"
    report = json.loads((run / "report.json").read_text())
    assert report["tokens_processed"] >= 4800
    assert report["val_loss"] < report["val_loss_initial"] / 2  # of the last model all the same
    assert report["failures"] == {"evaluator": failure}
    assert html.escape(f"evaluator: {failure}") in (run / "report.html").read_text()
    assert "validation loss" in ended.out
    assert json.loads((run / "status.json").read_text())["failures"] == {"evaluator": failure}
    assert "".join(f"evaluator: {failure}".split()) in "".join(diloco("status", "mine").out.split())


@pytest.mark.slow  # a whole `up`; its parts are in tests/shared/test_accounts.py and tests/coordinator/test_alerts.py
def test_a_run_whose_data_become_nan_ends_with_an_error(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = TASK.replace('if number == 100: raise OSError("part 100 is damaged")', "scale = np.nan if number > 20 else 1")
    damaged = damaged.replace("yield np.random", "yield scale * np.random").replace("2 - min(self.calls, 2)", "2")
    ended, _ = up(diloco, tmp_path, damaged, monkeypatch)
    failure = "the loss or gradients of its last 10 or more steps were not finite, and such a step changes nothing"
    assert ended.code == 1
    assert f"run mine has ended, but no learner trained to its end: learner-0: {failure}: check its data" in ended.err
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert set(report["failures"]) == {"learner-0", "learner-1"}
    assert report["val_loss"] < report["val_loss_initial"]  # steps before that are merged
