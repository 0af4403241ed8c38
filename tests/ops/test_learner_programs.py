"""Learners of each framework are started by the program that it names, on as many devices as it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.made.third_framework import install

from diloco.errors import RunError, SettingsError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.learner_programs import program_of, programs_of
from diloco_ops.up.launch import service_count
from diloco_ops.up.task_check import check_task


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    small = {"learners": 2, "shards": 1, "fragments.count": 2, "task.name": "of_third:make"}
    return RunDirectory(tmp_path / "run", "run", "", None, run_settings(overrides=small))


@pytest.mark.services
def test_a_run_of_a_third_framework_is_checked_and_started_as_that_says(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    found = check_task(directory)
    assert (found.framework, found.torch) == ("third", None)
    found.save()
    again = rundir.load(directory.path)
    assert {program.module for program in programs_of(again).values()} == {"third_learner"}
    with pytest.raises(SettingsError, match="--processes-per-learner: a learner of third is a single process"):
        check_task(replace(directory, processes_per_learner=2))


def test_learners_beside_others_are_of_their_own_framework(directory: RunDirectory) -> None:
    mixed = replace(directory, framework="jax", torch={"learner-1": "mine:make"}, processes_per_learner=2)
    programs = {name: program.module for name, program in programs_of(mixed).items()}
    assert programs == {"learner-0": "diloco_learner", "learner-1": "diloco_learner.pytorch", "evaluator": "diloco_learner"}
    assert service_count(mixed, standbys=0, coordinators=1) == 6  # with a syncer, and two processes of learner-0


def test_a_run_json_of_before_is_of_jax(directory: RunDirectory) -> None:
    assert directory.framework is None
    assert {program.module for program in programs_of(directory).values()} == {"diloco_learner"}


def test_a_framework_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunError, match=r"framework 'third': no installed distribution provides it \(installed: jax, torch\): install the"
    ):
        program_of("third")
    install(tmp_path, monkeypatch, "import no_such_library")
    with pytest.raises(RunError, match="its entry point third_framework:Third cannot be imported: ModuleNotFoundError: "):
        program_of("third")
