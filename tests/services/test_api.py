"""Runs from Python: started, looked at while they go on, stopped, gone on with, and read when they are over."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diloco
from diloco.errors import BrokerError, RunError, SettingsError
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.api import Run
from diloco_ops.up.supervise import ServiceFailed

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"fragments.count": 3, "round.steps": 4, "shards": 1}


def test_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run's directory"):
        diloco.open(tmp_path)
    with pytest.raises(SettingsError, match=r"name the run: diloco.open\('nats://127.0.0.1:1', run='NAME'\)"):
        diloco.open("nats://127.0.0.1:1")
    with pytest.raises(SettingsError, match="a directory belongs to one run; leave run out"):
        diloco.open(tmp_path, run="mine")
    RunDirectory(tmp_path, "mine", "", None, run_settings()).save()
    run = diloco.open(tmp_path)
    assert run.report is None
    with pytest.raises(RunError, match="run 'mine' has not been started yet"):
        run.status()
    with pytest.raises(SettingsError, match="--version 'newest': expected a number, a percentage such as 50%, or latest"):
        run.params("newest")


def test_a_task_that_learners_cannot_import_is_refused(tmp_path: Path) -> None:
    def make(settings: object, data: object) -> object:
        raise NotImplementedError

    with pytest.raises(SettingsError, match=r"cannot import it from .*test_api; write it to a file beside this one"):
        diloco.up(make, run_dir=tmp_path / "run")


def test_the_command_s_own_refusal_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match=r"option 'wide' \(did you mean 'width'\?\)") as refused:
        diloco.up(EXAMPLES / "classifier.py", run_dir=tmp_path / "run", options={"wide": 3}, settings=TINY, output=False)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def told_a_loss(run: Run) -> bool:
    """Whether a run's learner has; its coordinator may be slow to answer."""
    with contextlib.suppress(BrokerError):
        return bool(run.metrics())
    return False


@pytest.mark.slow
def test_a_run_from_its_beginning_to_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task, options = EXAMPLES / "classifier.py", {"width": 16}

    def fail() -> None:
        with diloco.up(task, learners=1, tokens=10**9, run_dir=tmp_path / "run", settings=TINY, options=options) as run:
            while not told_a_loss(run):
                signal.sigtimedwait([], 0.2)
            assert {"learners", "tokens_processed"} <= run.status().keys()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list((tmp_path / "run" / "checkpoints").iterdir())  # it was ended in order
    assert "; go on with: diloco up --run-dir" in capfd.readouterr().out
    assert diloco.open(tmp_path / "run").report is None

    quietly: dict[str, Any] = {"learners": 1, "tokens": 3000, "settings": TINY, "options": options, "output": False}
    with diloco.up(task, run_dir=tmp_path / "two", **quietly) as run:
        page = run.page
    assert page is not None
    assert page.startswith("http://127.0.0.1:")
    report = run.report
    assert report is not None
    assert report["tokens_processed"] >= 3000
    losses = [row for row in run.metrics() if (row["owner"], row["name"]) == ("run", "validation_loss")]
    assert losses[-1]["value"] == report["val_loss"]
    assert [one["closed"] for one in run.versions()] == [True] * 3
    first, last = run.params(0), run.params()
    assert {path: array.shape for path, array in last.items()} == {"hidden": (16, 64), "head": (10, 16)}
    assert np.count_nonzero(first["head"]) == 0
    assert np.count_nonzero(last["head"]) > 0
