"""Which of a learner's states on a disk is the newest one, and which one a process may remove."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.core.learner.saving import set_name
from diloco.processes import restoring
from diloco.settings.service import LearnerSettings
from diloco.states import state
from diloco.states.state import Content, StateFilePart
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Save

RUN = bytes(32)


def learner_settings(folder: Path) -> LearnerSettings:
    return LearnerSettings(name="learner-0", run="r", share=0, state_dir=folder)


def write(path: Path, name: str, time_s: int) -> Path:
    """Write the leader's part of a state of two processes."""
    state.save(path, RUN, "learner-0", {}, Content.of({}), part=StateFilePart(0, 2, name))
    os.utime(path, (time_s, time_s))
    return path


@pytest.mark.parametrize(
    ("generation", "whole", "stays"),
    [
        (5, set_name(5, 3), True),  # a process is lost just before this one begins to save as of boundary 7
        (5, "", True),
        (6, set_name(5, 7, kept=True), True),  # the generation has begun from it, and has no newer checkpoint
        (6, set_name(6, 4), False),
    ],
)
def test_a_state_that_was_kept_stays_until_a_newer_checkpoint_counts(
    tmp_path: Path, generation: int, whole: str, stays: bool
) -> None:
    kept = write(StateFolder(tmp_path, "learner-0").kept(), set_name(5, 7, kept=True), 10)
    restoring.own_place(learner_settings(tmp_path), RUN, 0, Save("own", set_name(generation, 7), whole, 0))
    assert kept.exists() == stays


def test_what_a_generation_keeps_is_newer_than_all_of_its_checkpoints(tmp_path: Path) -> None:
    kept = write(StateFolder(tmp_path, "learner-0").kept(), set_name(5, 9, kept=True), 10)
    path, previous = StateFolder(tmp_path, "learner-0").generations()
    write(previous, set_name(5, 3), 8)
    write(path, set_name(5, 7), 11)  # it was being saved when a process was lost
    assert restoring.newest_first(learner_settings(tmp_path), RUN) == [kept, path, previous]
    write(path, set_name(6, 2), 11)
    assert restoring.newest_first(learner_settings(tmp_path), RUN) == [path, kept, previous]


def test_a_process_that_stood_still_writes_nowhere_and_removes_nothing(tmp_path: Path) -> None:
    kept = write(StateFolder(tmp_path, "learner-0").kept(), set_name(5, 7, kept=True), 10)
    save = Save("own", set_name(6, 9), set_name(6, 4), 0)
    assert restoring.own_place(learner_settings(tmp_path), RUN, 0, save, missed=True) is None
    assert kept.exists()
