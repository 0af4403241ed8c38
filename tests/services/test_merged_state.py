"""Batch normalisation in a run of two learners: its statistics are merged, evaluated, exported and replayed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.services.conftest import Diloco

MEAN, DEVIATION = np.array([1, -2, 30, 0], np.float32), np.array([2, 0.5, 0.01, 3], np.float32)
DATA = """
import itertools
import numpy as np

MEAN, DEVIATION = np.array([1, -2, 30, 0], np.float32), np.array([2, 0.5, 0.01, 3], np.float32)

class Data:
    tokens_per_batch = 64

    def drawn(self, *seed):
        z = np.random.default_rng(seed).normal(size=(64, 4)).astype(np.float32)
        return MEAN + DEVIATION * z, z @ np.array([[1, 0], [0, 1], [1, 1], [-1, 0]], np.float32)

    def batches(self, share, shares, seed, start):
        return (self.drawn(share, number) for number in itertools.count(start))

    def validation(self):
        return [self.drawn(2**31, number) for number in range(2)]
"""
JAX = """
import jax.numpy as jnp
from normed_data import Data
from diloco_learner.task import Aux

class Task(Data):
    def init(self, key): return {"head": {"weight": jnp.zeros((2, 4)), "bias": jnp.zeros(2)}}

    def init_state(self, key):
        return {"norm": {"running_mean": jnp.zeros(4), "running_var": jnp.ones(4)}, "steps": jnp.int32(0)}

    def loss(self, params, batch, *, state, train):
        x, y = batch
        kept = state["norm"]
        mean, var = (jnp.mean(x, 0), jnp.var(x, 0)) if train else (kept["running_mean"], kept["running_var"])
        out = (x - mean) / jnp.sqrt(var + 1e-5) @ params["head"]["weight"].T + params["head"]["bias"]
        norm = {"running_mean": 0.9 * kept["running_mean"] + 0.1 * mean, "running_var": 0.9 * kept["running_var"] + 0.1 * var}
        return jnp.mean((out - y) ** 2), Aux(state={"norm": norm, "steps": state["steps"] + 1})

def make(settings, data): return Task()
"""
TORCH = """
import torch
from normed_data import Data

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 2)
    def forward(self, x): return self.head(self.norm(x))

class Task(Data):
    def module(self): return Net()
    def loss(self, module, batch):
        x, y = map(torch.from_numpy, batch)
        return torch.mean((module(x) - y) ** 2)

def make(settings, data): return Task()
"""


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["jax", "torch"])
def test_statistics_are_those_of_the_data_in_the_log_the_evaluation_and_the_export(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    if beside == "torch":
        pytest.importorskip("torch", reason="torch is not installed: make torch")
    for name, text in (("normed_data", DATA), ("normed", JAX), ("normed_torch", TORCH)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"task.name": "normed:make", "fragments.count": 3, "log.archive": "true", "inner.learning_rate": 0.05}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    others = ["--torch", "learner-1=normed_torch:make"] if beside == "torch" else []
    ended = diloco("up", "--run-dir", "run", "--learners", "2", "--tokens", "60000", "--plain", *options, *others)
    assert ended.code == 0, ended.err
    for command in (["verify", "run"], ["replay", "run", "--learners"]):
        ended = diloco(*command)
        assert ended.code == 0, ended.out + ended.err
    assert diloco("export", "run", "weights.safetensors").code == 0

    found = load_file(tmp_path / "weights.safetensors")
    mean, var = found["state/norm/running_mean"], found["state/norm/running_var"]
    assert found.keys() == {"head/weight", "head/bias", "state/norm/running_mean", "state/norm/running_var"}
    # an average of batches of 64, each of weight 0.1, has a deviation of 3 % of one value's
    np.testing.assert_allclose(mean, MEAN, atol=0.2 * DEVIATION.max())
    assert (np.abs(mean - MEAN) < 0.2 * DEVIATION).all()
    np.testing.assert_allclose(var, DEVIATION**2, rtol=0.3)
    # the evaluator's loss is that of these very values, computed by NumPy
    losses = []
    for number in range(2):
        z = np.random.default_rng((2**31, number)).normal(size=(64, 4)).astype(np.float32)
        x, y = MEAN + DEVIATION * z, z @ np.array([[1, 0], [0, 1], [1, 1], [-1, 0]], np.float32)
        out = (x - mean) / np.sqrt(var + 1e-5) @ found["head/weight"].T + found["head/bias"]
        losses.append(np.mean((out - y) ** 2))
    said = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert said["val_loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert said["val_loss"] < 0.7 * said["val_loss_initial"]


@pytest.mark.slow
def test_a_torch_task_of_another_model_is_refused_by_name_before_services_start(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    local = TORCH.replace("    def module", "    def merge_state(self, path): return 'local'\n    def module")
    for name, text in (("normed_data", DATA), ("normed", JAX), ("normed_torch", local)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--set", "task.name=normed:make", "--set", "fragments.count=3", "--torch", "learner-1=normed_torch:make"]
    ended = diloco("up", "--run-dir", "run", "--learners", "2", "--tokens", "60000", "--plain", *options)
    assert ended.code == 6
    assert (
        "--torch: normed_torch:make: run 'run': tensor 'state/norm/running_mean' differs: the run has shape (4,), state that "
        "is merged, this learner's model has no such tensor"
    ) in ended.err
    assert not (tmp_path / "run").exists()
