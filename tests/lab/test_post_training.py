"""Post-training: an arm's final model is trained further on other text, and its loss is that on the other text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.tiny_trials import STEP_TOKENS, TINY_TRIAL

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.errors import DataError, SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.experiment import answer, record, runner, spec
from diloco_lab.experiment.methods import Measured, play
from diloco_lab.experiment.runner import Results
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
CLAIM = """[[claims]]
arm = "further"
against = "first"
below = 0.0
"""
CURVES = """[curves]
parameters = 1e6
tokens = 1e6
grid = { tokens = [1024, 2048] }
"""
OF_TIME = """[[claims]]
arm = "further"
against = "again"
below = 0.0
of = "time"
[arms.again]
sample_s = 1.0
post_training = { text = "json", settings = { tokens = 1024 } }
[arms.further]
sample_s = 1.0
"""


def test_steps_that_move_nothing_leave_the_final_model_with_its_loss_on_the_other_text(text: str) -> None:
    model = Trial(SETTINGS, load_task(SETTINGS.task, text), PaceSpec().paces(SETTINGS.learners)).play().model
    on_other = Island(load_task(SETTINGS.task, str(STILL.folder())), SETTINGS)
    for fragment, values in zip(on_other.fragments().fragments, model, strict=True):
        on_other.write(fragment, values)
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


def test_it_is_data_parallel_training_with_the_batches_of_all_learners(text: str) -> None:
    training = PostTraining(text=OTHER, settings={"tokens": 6 * 2 * STEP_TOKENS, "inner.learning_rate": 0.01})
    model = Trial(SETTINGS, load_task(SETTINGS.task, text), PaceSpec().paces(2)).play().model
    after = training.settings_over(SETTINGS, "here")
    task = load_task(after.task, str(training.folder()))
    by_hand = Island(task, after)
    for fragment, values in zip(by_hand.fragments().fragments, model, strict=True):
        by_hand.write(fragment, values)
    shares = [task.batches(share, 2, after.seed, 0) for share in range(2)]
    for step in range(6):
        batch = np.concatenate([next(share) for share in shares])
        by_hand.step(batch, learning_rate(after, Moment(step * 2 * STEP_TOKENS, after.tokens)), (0, step)).wait()
    assert play(Arm(post_training=training), SETTINGS, text).loss == pytest.approx(by_hand.evaluate(), abs=1e-4)


def test_it_is_in_the_estimate_of_a_trial(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        EXPERIMENT.replace("[arms.further]", "[arms.first]\n[arms.further]").replace("tokens = 1024", "tokens = 409600")
    )
    with runner.pool(1) as processes:
        found = runner.costs(spec.load(str(path)), text, processes)
    # 200 times the tokens of the first training; the first step of each, which compiles, takes longest
    assert found["further"].trial_s - found["first"].trial_s > 50 * found["first"].step_s


def test_a_missing_text_ends_the_estimate_before_any_trial(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(EXPERIMENT.replace('"json"', '"no_such_folder"'))
    with runner.pool(1) as processes, pytest.raises(DataError, match=r"there is no folder .*no_such_folder"):
        runner.costs(spec.load(str(path)), text, processes)


def test_the_page_says_what_the_losses_are_of_and_they_are_no_reference(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    chosen = 'chosen = "the best of three"\nmethod = "data-parallel"\npost_training'
    path.write_text(
        EXPERIMENT.replace("post_training", chosen).replace("tokens = 1024", 'tokens = 1024, "inner.optimizer" = "adamw"')
    )
    experiment = spec.load(str(path))
    results = Results({("further", seed): Measured(loss=2.0, tokens=2048, wall_s=1.0) for seed in (0, 1)}, {})
    kept = record.ExperimentRecord("mine", experiment, [], results, record.where(experiment), text="aa")
    file = tmp_path / f"mine{record.SUFFIX}"
    file.write_text(kept.encode())
    again = record.read(file)
    assert again.asked == experiment
    page = answer.markdown(again)
    assert (
        "Losses of further are those after further training on `json` of Python's library, tokens 1024, "
        "inner.optimizer adamw, on held-out files of it." in page
    )
    assert "text of json " in page
    assert again.reference() is None


def test_results_with_and_without_it_are_apart(tmp_path: Path) -> None:
    store = TrialStore(tmp_path)
    arms = [Arm(post_training=training) for training in (None, STILL, MOVED)]
    assert len({store.path(arm, SETTINGS, None) for arm in arms}) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"json"', '"../json"', r"post_training\.text"),
        ('"json"', '"/etc"', r"post_training\.text"),
        ('"json"', '"."', r"post_training\.text"),
        ('"json"', '"site-packages"', r"post_training\.text"),
        ("[arms.further]", 'bars = ["first"]\n[arms.first]\n[arms.further]', "further and first are compared"),
        ("[arms.further]", f"[arms.first]\n{CLAIM}[arms.further]", "further and first are compared, but post_training.text"),
        ("[arms.further]", f"{CURVES}[arms.further]", "curves: their losses are those of the first training"),
        ("[arms.further]", OF_TIME, "a claim of time is about the first training"),
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
    training = PostTraining(text="no_such_folder", settings={"tokens": 64})
    with pytest.raises(
        DataError, match=r"post_training\.text = 'no_such_folder': there is no folder .*no_such_folder\. Some distributions"
    ):
        play(Arm(method="alone", post_training=training), SETTINGS, text)
