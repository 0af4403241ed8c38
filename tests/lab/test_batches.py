"""Batches that are trees: those of several learners are one, and tasks that have them are played."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.made.tiny_trials import TINY_TRIAL

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.batches import join
from diloco_lab.experiment import spec
from diloco_lab.experiment.methods import play
from diloco_lab.experiment.spec import Arm
from diloco_lab.paces.spec import PaceSpec
from diloco_learner.task import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples")
def test_batches_of_several_learners_are_one() -> None:
    task = load_task(run_settings(overrides={"task.name": "mixture_of_experts:make"}).task, None)
    first, second = (next(task.batches(share, 2, 0, 0)) for share in (0, 1))
    joined = join(task, [first, second], "mine")
    assert joined.keys() == {"x", "y"}
    assert joined["x"].shape == (128, 16, 16, 1)
    assert (joined["y"] == np.concatenate([first["y"], second["y"]])).all()
    assert join(task, [first], "mine") is first
    with pytest.raises(SettingsError, match=r"task.name = 'mine': the array scale has shape \[\], and a batch 64 rows"):
        join(task, [first | {"scale": np.float32(1)}, second | {"scale": np.float32(1)}], "mine")


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("name", ["moe", "vision"])
def test_tasks_with_batches_that_are_trees_are_played(name: str, tmp_path: Path) -> None:
    experiment = spec.load(name)
    tiny = {
        "learners": 2,
        "tokens": 2 * 64 * 12,
        "shards": 1,
        "fragments.count": 2,
        "round.steps": 4,
        "inner.learning_rate": 0.008,
    }
    tiny |= {key: value for key, value in TINY_TRIAL.items() if key.startswith("task.")}
    experiment = experiment.model_copy(update={"settings": experiment.settings | tiny})
    tape = tmp_path / "mine.jsonl"
    tape.write_text(
        '{"format": "diloco-failures", "version": 1, "duration_s": 1000.0}\n'
        '{"at_s": 0.0, "kind": "chip_loss", "target": "learner-0/slice-3", "duration_s": 900.0}\n'
    )
    failing = Arm(pace=PaceSpec(tape=str(tape), tape_step_s=1000.0, slices=4))
    whole, joint, part = (
        play(arm, experiment.settings_of("decoupled", 0), None) for arm in (Arm(), experiment.arms["data-parallel"], failing)
    )
    assert None not in (whole.loss, joint.loss, part.loss)
    # 1,536 images are 12 steps of both learners; of a learner with one of two slices a step has 32, and there are 16
    assert joint.virtual_s == pytest.approx(1.2)
    assert part.virtual_s is not None
    assert whole.virtual_s is not None
    assert part.virtual_s > whole.virtual_s + 0.3
