"""Weights in a file, evaluated and drawn from: by the task's own loss, its own sample, and errors that name what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import TaskSettings
from diloco_learner.evaluate import evaluate
from diloco_learner.task import GptTask

TASK = """
import jax.numpy as jnp

class Mine:
    tokens_per_batch = 4
    def __init__(self, data): self.data = data
    def init(self, key): return {"weight": jnp.ones((2, 3))}
    def loss(self, params, batch): return jnp.sum(params["weight"]) * batch
    def batches(self, share, shares, seed, start): raise NotImplementedError
    def validation(self): return [jnp.float32(1), jnp.float32(float(self.data or 3))]
    def is_embedding(self, path): return False

class Draws(Mine):
    def sample(self, params, key, count): return "x" * count + f"{float(jnp.sum(params['weight'])):g}"

class GoesOn(Mine):
    def sample(self, params, key, count, prompt="?"): return prompt + "y" * count

class Fails(Mine):
    def sample(self, params, key, count): raise ArithmeticError("no more ink")

def make(kind):
    return lambda settings, data: kind(data)

silent, draws, goes_on, fails = map(make, (Mine, Draws, GoesOn, Fails))
"""


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "evaluated_tasks.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "cache"))
    save_file({"weight": np.array([[1, 2, 3], [4, 5, 6]], np.float32)}, tmp_path / "file")
    return tmp_path / "file"


def result(weights: Path, task: str, data: str | None = None, **sample: Any) -> dict[str, Any]:
    settings = run_settings(overrides={"task.name": f"evaluated_tasks:{task}", "fragments.count": 2})
    return evaluate(
        settings, data, weights, {"seed": 0, "count": 2, "prompt": None, "early": True} | sample if sample else None
    )


def test_the_loss_is_the_mean_over_the_batches_that_are_held_out(weights: Path) -> None:
    # the weights' sum is 21; batches of 1 and 3, or 1 and what the data say
    assert result(weights, "silent") == {"loss": 42.0, "units": None, "values": {}}
    assert result(weights, "silent", data="5") == {"loss": 63.0, "units": None, "values": {}}
    assert result(weights, "silent", data="nan") == {"loss": None, "units": None, "values": {}}  # JSON has no NaN


def test_a_sample_is_what_the_task_draws(weights: Path) -> None:
    assert result(weights, "draws", count=3) == {"sample": "xxx21", "prompt": "", "early": None}
    assert result(weights, "goes_on", count=1) == {"sample": "?y", "prompt": "", "early": None}
    assert result(weights, "goes_on", prompt="and ") == {"sample": "and yy", "prompt": "and ", "early": None}


@pytest.mark.parametrize(
    ("task", "sample", "said"),
    [
        ("silent", {"count": 3}, "it has no sample(), which draws from the model"),
        ("draws", {"prompt": "and"}, "its sample() has no parameter 'prompt': leave out --prompt"),
        ("fails", {"count": 3}, "ArithmeticError: no more ink ("),
    ],
)
def test_what_a_task_cannot_do_is_said(weights: Path, task: str, sample: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"task.name = 'evaluated_tasks:{task}': {said}")):
        result(weights, task, **sample)


def test_why_it_is_too_early_for_text_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "text").write_text("abababababababababababababababab" * 400)  # pairs of bytes say almost everything of it
    settings = run_settings(overrides={"task.layers": 1, "task.width": 8, "task.heads": 1, "task.context": 8, "task.batch": 2})
    task = GptTask(settings.task, str(tmp_path / "text"))
    leaves, _ = jax.tree_util.tree_flatten_with_path(task.init(jax.random.key(0)))
    save_file(
        {jax.tree_util.keystr(keys, simple=True, separator="/"): np.zeros(a.shape, "f4") for keys, a in leaves},
        tmp_path / "file",
    )
    found = evaluate(
        settings, str(tmp_path / "text"), tmp_path / "file", {"seed": 0, "count": 2, "prompt": None, "early": True}
    )
    # weights of zeros give all 256 bytes the same probability: ln 256 = 5.545
    assert found["early"] == "too early for text: loss 5.55, counting pairs of bytes gives 0.00"


def test_weights_of_another_model_are_refused_by_name(weights: Path) -> None:
    save_file({"weigth": np.ones((2, 3), np.float32)}, weights)
    with pytest.raises(SettingsError, match=re.escape(f"{weights}: it lacks tensor 'weight' of shape (2, 3)")) as error:
        result(weights, "silent")
    assert not str(error.value).startswith("init")


def test_the_built_in_task_goes_on_from_words_of_its_text(tmp_path: Path) -> None:
    settings = TaskSettings(layers=1, width=8, heads=1, context=8, batch=2)
    (tmp_path / "text").write_text("\n\n  words and more words\n" * 400)
    own = GptTask(settings, str(tmp_path / "text"))
    held_out = own.data.corpus.to_evaluate.text.tobytes().decode()  # type: ignore[union-attr]
    assert own.prompt == " ".join(held_out.split()[:3]) + " "
    assert GptTask(settings, None).prompt == "\n\ndef "
    params, key = own.init(jax.random.key(0)), jax.random.key(1)
    assert own.sample(params, key, 6) == own.sample(params, key, 6, own.prompt)


def test_the_built_in_task_goes_on_from_the_end_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words and words\n" * 400)
    task = GptTask(TaskSettings(layers=1, width=8, heads=1, context=8, batch=2), str(tmp_path / "text"))
    params, key = task.init(jax.random.key(0)), jax.random.key(1)
    drawn = task.sample(params, key, 6, "a long prompt: abcdefgh")
    assert drawn == task.sample(params, key, 6, "abcdefgh")  # the model sees eight bytes
    with pytest.raises(SettingsError, match="at least one byte"):
        task.sample(params, key, 6, "")
