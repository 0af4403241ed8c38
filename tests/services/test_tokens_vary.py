"""Runs of learners whose labels are masked, one's by 10 % and the other's by 90 %: tokens are those that were counted."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco

from diloco.core.run.tape import scan
from diloco.process import tape
from diloco.service import rundir

ROWS, INPUTS, CLASSES, BUDGET = 64, 4, 3, 12_000
# learners wait for each other in the folder MEET after their first steps: the first one would use up the budget alone
DATA = f"""
import itertools
import os
import sys
import time
from pathlib import Path
import numpy as np

ROWS, INPUTS, CLASSES = {ROWS}, {INPUTS}, {CLASSES}
TRUTH = np.random.default_rng(5).normal(size=(CLASSES, INPUTS)).astype(np.float32)

def drawn(rate, *seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    labels = (x @ TRUTH.T + rng.gumbel(size=(ROWS, CLASSES))).argmax(1)
    return {{"x": x, "labels": np.where(rng.random(ROWS) < rate, -100, labels).astype(np.int32)}}

class Data:
    tokens_per_batch = ROWS

    def batches(self, share, shares, seed, start):
        for number in itertools.count(start):
            if "--config" in sys.argv and number >= start + 4:  # of a learner that has compiled, and founded the run
                (Path(os.environ["MEET"]) / str(share)).touch()
                while len(list(Path(os.environ["MEET"]).iterdir())) < 2:
                    time.sleep(0.02)
                time.sleep(0.005)
            yield drawn(0.9 if share % 2 else 0.1, seed, share, number)

    def validation(self):
        return [drawn(0.0, 2**31, number) for number in range(20)]
"""
JAX = """
import jax
import jax.numpy as jnp
from masked_data import CLASSES, INPUTS, Data
from diloco_learner.task import Aux

class Task(Data):
    def init(self, key): return {"head": {"weight": jnp.zeros((CLASSES, INPUTS)), "bias": jnp.zeros(CLASSES)}}

    def loss(self, params, batch):
        mask = batch["labels"] >= 0
        scores = jax.nn.log_softmax(batch["x"] @ params["head"]["weight"].T + params["head"]["bias"])
        each = -jnp.take_along_axis(scores, jnp.maximum(batch["labels"], 0)[:, None], 1)[:, 0]
        tokens = jnp.sum(mask)
        return jnp.sum(each * mask) / tokens, Aux(tokens=tokens)

def make(settings, data): return Task()
"""
TORCH = """
import torch
from masked_data import CLASSES, INPUTS, Data
from diloco_learner.pytorch import Aux

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(INPUTS, CLASSES)
        torch.nn.init.zeros_(self.head.weight), torch.nn.init.zeros_(self.head.bias)
    def forward(self, x): return self.head(x)

class Task(Data):
    def module(self): return Net()
    def loss(self, module, batch):
        labels = torch.from_numpy(batch["labels"]).long()
        scores = module(torch.from_numpy(batch["x"]))
        return torch.nn.functional.cross_entropy(scores, labels), Aux(tokens=(labels != -100).sum())

def make(settings, data): return Task()
"""
# of two classes, by biases alone: of each batch of share 0 all but 6 rows count, and are of class 0; of share 1, 6 of class 1
BIASED = """
import itertools
import jax
import jax.numpy as jnp
import numpy as np
from diloco_learner.task import Aux

class Task:
    tokens_per_batch = 64

    def init(self, key): return {"bias": jnp.zeros(2)}

    def loss(self, params, batch):
        tokens = jnp.sum(batch["mask"])
        each = -jax.nn.log_softmax(params["bias"])[batch["labels"]]
        return jnp.sum(each * batch["mask"]) / tokens, Aux(tokens=tokens)

    def batches(self, share, shares, seed, start):
        counting = np.arange(64) < (6 if share % 2 else 58)
        return itertools.repeat({"labels": np.full(64, share % 2, np.int32), "mask": counting})

    def validation(self):
        return [next(self.batches(share, 2, 0, 0)) for share in range(2)]

def make(settings, data): return Task()
"""


def run(diloco: Diloco, *more: str, settings: dict[str, Any]) -> None:
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    ended = diloco("up", "--run-dir", "run", "--learners", "2", "--shards", "1", "--plain", *sets, *more)
    assert ended.code == 0, ended.err


def loss_of(weight: NDArray[Any], bias: NDArray[Any], batches: Sequence[Any]) -> float:
    losses = []
    for batch in batches:
        scores = batch["x"] @ weight.T + bias
        losses.append(np.logaddexp.reduce(scores, 1) - scores[np.arange(ROWS), batch["labels"]])
    return float(np.mean(losses))


def alone(data: Any, seed: int) -> float:
    """Return the loss of one process on the mix, with plain stochastic gradients of the mean over tokens, in NumPy."""
    weight, bias, done = np.zeros((CLASSES, INPUTS)), np.zeros(CLASSES), 0
    shares = [data.Data().batches(share, 2, seed, 0) for share in range(2)]
    while done < BUDGET:
        both = [next(share) for share in shares]
        x, labels = (np.concatenate([batch[name] for batch in both]) for name in ("x", "labels"))
        x, labels = x[labels >= 0], labels[labels >= 0]
        scores = x @ weight.T + bias
        off = np.exp(scores - np.logaddexp.reduce(scores, 1)[:, None]) - np.eye(CLASSES)[labels]
        rate = 0.5 * (1 + math.cos(math.pi * done / BUDGET))
        weight, bias, done = weight - rate * off.T @ x / len(x), bias - rate * off.mean(0), done + len(x)
    return loss_of(weight, bias, data.Data().validation())


@pytest.mark.parametrize("beside", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_learners_of_unequal_masks_end_where_one_process_on_the_mix_does_and_their_tokens_are_those_counted(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    if beside == "torch":
        pytest.importorskip("torch", reason="torch is not installed: make torch")
    for name, text in (("masked_data", DATA), ("masked", JAX), ("masked_torch", TORCH)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "masked_data", raising=False)
    (tmp_path / "meet").mkdir()
    monkeypatch.setenv("MEET", str(tmp_path / "meet"))
    data = importlib.import_module("masked_data")
    others = ["--torch", "learner-1=masked_torch:make"] if beside == "torch" else []
    inner = {"inner.learning_rate": 0.05, "inner.optimizer": "adamw", "inner.weight_decay": 0.0}
    settings = inner | {"task.name": "masked:make", "fragments.count": 2, "round.steps": 8}
    run(diloco, "--tokens", str(BUDGET), *others, settings=settings | {"log.archive": "true"})

    references = [alone(data, seed) for seed in range(3)]
    said = json.loads((tmp_path / "run" / "report.json").read_text())
    noise = max(references) - min(references)
    within = max(2 * noise, 0.03 * np.mean(references))  # merges come late on a busy machine, and the optimizers differ
    assert abs(said["val_loss"] - np.mean(references)) < within, (said, references)

    # each batch again from its seed: what was counted in it is what the run has booked
    seed, counted = rundir.load(tmp_path / "run").settings.seed, dict[str, int]()
    for path in (tmp_path / "run" / "tapes").glob("learner-*.tape"):
        (life,) = tape.load(path, scan(path.read_bytes()).header.run).lives()
        places = [(share, first + k) for share, first, count in life.ranges() for k in range(count)]
        batches = [data.drawn(0.9 if share % 2 else 0.1, seed, share, number) for share, number in places]
        expected = [max(1, int((batch["labels"] >= 0).sum())) for batch in batches]  # one in a thousand of share 1 has none
        assert list(life.step_tokens(ROWS)) == expected
        counted[path.stem] = sum(expected)
    assert {name: learner["tokens_processed"] for name, learner in said["learners"].items()} == counted
    assert said["tokens_processed"] == sum(counted.values())
    assert said["tokens_processed"] >= BUDGET
    assert (said["data"]["tokens_vary"], said["data"]["batch_tokens"], said["data"]["errors"]) == (True, ROWS, [])
    ratio = counted["learner-0"] / said["learners"]["learner-0"]["steps"] / ROWS
    assert 0.8 < ratio < 1

    for command in (["verify", "run"], ["replay", "run", "--learners"]):
        ended = diloco(*command)
        assert ended.code == 0, ended.out + ended.err


def test_gradients_of_learners_are_averaged_by_the_tokens_that_they_counted(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "biased.py").write_text(BIASED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    inner = {"inner.learning_rate": 0.1, "inner.weight_decay": 0.0, "inner.clip_norm": 10.0}  # each learner clips its own
    settings = inner | {"task.name": "biased:make", "fragments.count": 1}
    run(diloco, "--preset", "data-parallel", "--tokens", str(64 * 150), settings=settings)

    assert diloco("export", "run", "weights.safetensors").code == 0
    bias = load_file(tmp_path / "weights.safetensors")["bias"]
    # the gradient vanishes where each class has the probability that it has among all tokens: 58 of 64, and 6
    assert bias[0] - bias[1] == pytest.approx(math.log(58 / 6), abs=0.02)
    said = json.loads((tmp_path / "run" / "report.json").read_text())
    assert said["val_loss"] == pytest.approx(-(58 * math.log(58 / 64) + 6 * math.log(6 / 64)) / 64, abs=1e-3)
    steps = {name: learner["steps"] for name, learner in said["learners"].items()}
    processed = {name: learner["tokens_processed"] for name, learner in said["learners"].items()}
    assert processed == {"learner-0": 58 * steps["learner-0"], "learner-1": 6 * steps["learner-1"]}
