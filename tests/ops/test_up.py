"""Sentences at the beginning and the end of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import RunError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.up import task_check, up
from diloco_ops.up.run_summary import on_missed


@pytest.mark.parametrize(
    ("preset", "said"), [("diloco", "note: the run has 1 full round of each fragment: "), ("decoupled", "")]
)
def test_a_run_that_is_too_short_is_told_so_before_it_begins(
    preset: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts: dict[str, Any] = {
        "step_tokens": 2048,
        "units": None,
        "framework": "jax",
        "mix": None,
        "map": None,
        "notes": [],
    }  # 915 steps of each learner
    monkeypatch.setattr(task_check, "ask", lambda *_: facts)
    task_check.check_task(RunDirectory(tmp_path, "run", "", None, run_settings(preset)))
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ({"ann": (251, 1564), "bob": (204, 1611)}, "each learner missed 11 % of the versions or more"),  # 204 / 1815
        ({"ann": (30, 1700), "bob": (300, 1430)}, None),  # bob alone was late
        ({"ann": (900, 100)}, None),  # no other learner's offers closed its rounds
        ({"ann": (0, 0), "bob": (0, 0)}, None),
        ({}, None),
    ],
)
def test_rounds_that_all_learners_miss_are_told(rounds: dict[str, tuple[int, int]], said: str | None) -> None:
    learners = {name: {"rounds_missed": missed, "rounds_merged": merged} for name, (missed, merged) in rounds.items()}
    report: dict[str, Any] = {"learners": learners, "settings": {"round": {"overlap_steps": 2.0}}}
    found = on_missed(report)
    assert found is None if said is None else found is not None and found.startswith(said)
    if found:
        assert "round.overlap_steps (2) steps" in found


def test_a_directory_that_another_up_makes_is_said_to_be_in_use(tmp_path: Path) -> None:
    with rundir.locked(tmp_path / "new"):  # the other one has written nothing yet
        for look in (up._check_new, lambda path, _: up.directory_of(path, run_settings("decoupled"), False, None, None)):
            with pytest.raises(RunError, match="another `diloco up` is at work on this run"):
                look(tmp_path / "new", "a checkpoint")
    up._check_new(tmp_path / "new", "a checkpoint")  # the lock's file alone makes it no run's directory


def test_of_two_that_begin_one_run_the_second_leaves_it_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "run", "", None, run_settings("decoupled"))
    replace(directory, name="theirs").save()  # while this process checked its own
    with pytest.raises(RunError, match=r"another `diloco up` began a run here at the same time: go on with that one"):
        up._begun(directory, None, None, existed=True, quiet=True)
    assert rundir.load(tmp_path).name == "theirs"
