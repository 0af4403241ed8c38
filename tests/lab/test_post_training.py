"""Post-training: an arm's final model is trained further on other text, and its loss is that on the other text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.made.tiny_trials import STEP_TOKENS, TINY_TRIAL

from diloco.errors import DataError, SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.experiment import spec
from diloco_lab.experiment.methods import play
from diloco_lab.experiment.spec import Arm, PostTraining
from diloco_lab.experiment.store import TrialStore
from diloco_lab.paces.spec import PaceSpec
from diloco_lab.trial import Trial
from diloco_learner.jax.island import Island
from diloco_learner.task import load_task

OTHER = "json"  # a package of five modules
SETTINGS = run_settings("decoupled", TINY_TRIAL | {"tokens": 24 * STEP_TOKENS})
STILL = PostTraining(text=OTHER, settings={"tokens": 8 * STEP_TOKENS, "inner.learning_rate": 1e-30, "inner.weight_decay": 0.0})
MOVED = PostTraining(text=OTHER, settings={"tokens": 400 * STEP_TOKENS, "inner.learning_rate": 0.01})

EXPERIMENT = """
question = "Does the parity survive?"
seeds = 2
settings = { tokens = 2048, learners = 2 }
[arms.further]
post_training = { text = "json", settings = { tokens = 1024 } }
"""


def test_steps_that_move_nothing_leave_the_final_model_with_its_loss_on_the_other_text(text: str) -> None:
    model = Trial(SETTINGS, load_task(SETTINGS.task, text), PaceSpec().paces(SETTINGS.learners)).play().model
    on_other = Island(load_task(SETTINGS.task, str(STILL.folder())), SETTINGS)
    for fragment in on_other.fragments().fragments:
        on_other.write(fragment, model.read(fragment).to_host())
    before, further = (play(Arm(post_training=training), SETTINGS, text) for training in (None, STILL))
    assert further.loss == pytest.approx(on_other.evaluate(), abs=1e-6)
    assert further.loss != pytest.approx(before.loss, abs=0.01)
    # all else is of the training before it
    assert (further.tokens, further.virtual_s, further.merged) == (before.tokens, before.virtual_s, before.merged)


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_further_training_lowers_the_loss_on_its_text(method: Any, text: str) -> None:
    still, moved = (play(Arm(method=method, post_training=training), SETTINGS, text).loss for training in (STILL, MOVED))
    assert still is not None
    assert moved is not None
    assert moved < 0.9 * still


def test_results_with_and_without_it_are_apart(tmp_path: Path) -> None:
    store = TrialStore(tmp_path)
    arms = [Arm(post_training=training) for training in (None, STILL, MOVED)]
    assert len({store.path(arm, SETTINGS, None) for arm in arms}) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"json"', '"../json"', "'../json' is not a folder inside the standard library"),
        ('"json"', '"/etc"', "'/etc' is not a folder inside the standard library"),
        ("tokens = 1024", '"task.width" = 8', "takes tokens and inner settings, not task.width"),
        ("tokens = 1024", '"inner.rate" = 8', "arm further, post_training: no setting 'inner.rate'"),
        ("learners = 2", 'learners = 2, "task.name" = "mine:make"', "only the built-in task takes other text"),
    ],
)
def test_post_training_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in EXPERIMENT
    path.write_text(EXPERIMENT.replace(old, new, 1))
    with pytest.raises(SettingsError, match=said):
        spec.load(str(path))


def test_a_folder_that_this_python_lacks_is_named(text: str) -> None:
    training = PostTraining(text="no-such-folder", settings={"tokens": 64})
    with pytest.raises(DataError, match="no-such-folder: there is no such file or folder"):
        play(Arm(method="alone", post_training=training), SETTINGS, text)
