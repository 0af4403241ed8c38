"""State in a run of two learners: batch normalisation, merged, evaluated, exported, replayed; a run that is killed goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco
from tests.pace import DEADLINE_S

from diloco.process import tape
from diloco.states import state
from diloco.states.statefolder import StateFolder
from diloco.wire.entries import Record
from diloco_ops.audit.refold import refold
from diloco_ops.reading import run_reader
from diloco_ops.weights import export

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

    evaluated = diloco("eval", "weights.safetensors")
    assert evaluated.code == 0, evaluated.err

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
    assert evaluated.out.startswith(f"loss {said['val_loss']:.4f}")


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


# a step adds RATES to an array that is merged; each learner counts its own steps, and has a running mean of its own
RATES = np.array([1, 2, 4])
# learners wait for each other in the folder MEET after their first steps, and take a step in PACE_S at least
COUNTED_DATA = """
import itertools
import os
import sys
import time
from pathlib import Path
import numpy as np

def paced(share, start):
    met, is_learner = Path(os.environ["MEET"]), "--config" in sys.argv
    for number in itertools.count(start):
        if is_learner and number >= start + 4:  # it has compiled, and founded the run
            (met / f"{share}").touch()
            while len(list(met.iterdir())) < 2:
                time.sleep(0.02)
            time.sleep(float(os.environ["PACE_S"]))
        yield number

def drawn(*seed):
    x = np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    return x, x[:, :2] + x[:, 2:]

class Data:
    tokens_per_batch = 8
    evaluate_every_s = 0.5
    def batches(self, share, shares, seed, start): return (drawn(share, number) for number in paced(share, start))
    def validation(self): return [drawn(2**31)]
"""
COUNTED = """
import jax.numpy as jnp
from counted_data import Data
from diloco_learner.task import Aux

class Task(Data):
    def init(self, key): return {"head": {"weight": jnp.zeros((2, 4)), "bias": jnp.zeros(2)}}
    def init_state(self, key): return {"seen": jnp.zeros(3), "own": {"steps": jnp.int32(0), "mean": jnp.zeros(4)}}
    def merge_state(self, path): return "average" if path == "seen" else "local"

    def loss(self, params, batch, *, state):
        (x, y), own = batch, state["own"]
        # what a step does depends on both kinds: other state makes other parameters
        away = x - own["mean"] * (1 + own["steps"] % 3) + jnp.log1p(state["seen"][0])
        out = away @ params["head"]["weight"].T + params["head"]["bias"]
        own = {"steps": own["steps"] + 1, "mean": own["mean"] / 2 + jnp.mean(x, 0) / 2}
        return jnp.mean((out - y) ** 2), Aux(state={"seen": state["seen"] + jnp.array([1.0, 2.0, 4.0]), "own": own})

    def evaluate(self, params, *, state): return {"seen": state["seen"][0], "steps": state["own"]["steps"]}

def make(settings, data): return Task()
"""
COUNTED_TORCH = """
import torch
from counted_data import Data

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.own = torch.nn.Linear(4, 2), torch.nn.Module()
        self.register_buffer("seen", torch.zeros(3))
        self.own.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.own.register_buffer("mean", torch.zeros(4))

class Task(Data):
    def module(self): return Net()
    def merge_state(self, path): return "average" if path == "seen" else "local"

    def loss(self, module, batch):
        (x, y), own = map(torch.from_numpy, batch), module.own
        away = x - own.mean * (1 + own.steps % 3) + torch.log1p(module.seen[0])
        loss = torch.mean((module.head(away) - y) ** 2)
        own.steps.add_(1)
        own.mean.copy_(own.mean / 2 + x.mean(0) / 2)
        module.seen.add_(torch.tensor([1.0, 2.0, 4.0]))
        return loss

def make(settings, data): return Task()
"""
COUNTING = {
    "task.name": "counted:make",
    "fragments.count": 2,
    "round.steps": 6,
    "carry.overlap": "false",  # so an offer's steps are those since the version that its learner holds
    "inner.optimizer": "adamw",
    "inner.learning_rate": 0.01,
    "log.archive": "true",
}
NAMES = ("learner-0", "learner-1")


def meet(monkeypatch: pytest.MonkeyPatch, folder: Path, pace_s: float = 0.0) -> None:
    """Have the next run's learners wait for each other, and take a step in so much time at least."""
    folder.mkdir()
    monkeypatch.setenv("MEET", str(folder))
    monkeypatch.setenv("PACE_S", str(pace_s))


def killed_in_the_middle(run: Path, options: Sequence[str]) -> None:
    """Start a run, and kill all its processes once each learner has saved its state twice."""
    up = subprocess.Popen([str(Path(sys.executable).parent / "diloco"), "up", *options], stdout=subprocess.DEVNULL)
    files = [StateFolder(run, name).generations()[1] for name in NAMES]  # the states before the newest
    until_s = time.monotonic() + 2 * DEADLINE_S  # both import and compile first
    try:
        while not all(file.exists() for file in files):
            assert up.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.1)
    finally:
        others = psutil.Process(up.pid).children(recursive=True)
        up.kill()
        for process in others:
            process.kill()
        up.wait()


def own(path: Path, name: str, what: str) -> NDArray[Any]:
    """Return a value of a learner's own from the newest state that it saved."""
    saved: dict[str, NDArray[Any]] = load_file(StateFolder(path, name).generations()[0])
    return saved[f"state/own/{what}" if f"state/own/{what}" in saved else f"buffers/own.{what}"]


@dataclass(frozen=True)
class Left:
    """A run that is over, as it is found: the averages by version, computed here, and each learner's steps and batches."""

    first: NDArray[Any]  # of the state that is merged, as the log begins with it
    merged: NDArray[np.float32]  # as it ends
    expected: NDArray[Any]
    learners: dict[str, tuple[int, int, NDArray[Any]]]  # steps that it says, steps in its state, and its own mean
    batches: dict[str, list[tuple[int, int]]]  # by learner the last of its shares and batches

    @classmethod
    def of(cls, path: Path) -> Left:
        return asyncio.run(cls._of(path))

    @classmethod
    async def _of(cls, path: Path) -> Left:
        records: list[Record] = []
        async with run_reader.opened(path) as seen:
            identity = seen.run.identity
            [index] = [fragment.index for fragment in seen.map.fragments if fragment.state]
            first = (await seen.log.reader.load_first(index, seen.genesis, seen.genesis_check)).replica.theta
            await refold(seen, index, lambda entry: records.append(entry.record))
            newest = await export.newest(seen, index)
        values = {0: first.astype(np.float64)}
        for record in records:
            if record.entry == "version":
                made = [values[member.base_version] + member.steps * RATES for member in record.members]
                values[record.version] = np.average(made, axis=0, weights=[member.weight for member in record.members])
        learners = {}
        for name in NAMES:
            said = state.load(StateFolder(path, name).generations()[0], identity, name).accounts["step"]
            learners[name] = said, int(own(path, name, "steps")), own(path, name, "mean")
        batches: dict[str, list[tuple[int, int]]] = {}
        for read in tape.load_all(path, identity)[0]:
            for life in read.lives():
                ranges = [(share, batch) for _, share, at, count in life.data for batch in range(at, at + count)]
                batches[read.name] = ranges  # of the last life
        return cls(first, newest.theta, values[max(values)], learners, batches)

    def check(self, began: Mapping[str, NDArray[Any]]) -> None:
        """Find the averages and each learner's own values to be those that are computed here; ``began`` are the own means."""
        np.testing.assert_allclose(self.merged, self.expected, rtol=1e-5)
        for name, (said, counted, mean) in self.learners.items():
            assert counted == said > 0
            expected = began[name].astype(np.float64)
            for share, number in self.batches[name]:
                x = np.random.default_rng((share, number)).normal(size=(8, 4)).astype(np.float32)
                expected = expected / 2 + x.mean(0, np.float64) / 2
            np.testing.assert_allclose(mean, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["jax", "torch"])
def test_a_run_of_which_all_was_killed_goes_on_with_its_averages_and_each_learner_s_own_state(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    if beside == "torch":
        pytest.importorskip("torch", reason="torch is not installed: make torch")
    for name, text in (("counted_data", COUNTED_DATA), ("counted", COUNTED), ("counted_torch", COUNTED_TORCH)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))  # what is trained again is so in this process
    monkeypatch.setenv("DILOCO_CHECKPOINT_S", "0.3")
    options = [part for key, value in COUNTING.items() for part in ("--set", f"{key}={value}")]
    options += ["--torch", "learner-1=counted_torch:make"] if beside == "torch" else []
    meet(monkeypatch, tmp_path / "met", 0.1)  # a budget of 150 s at least
    killed_in_the_middle(Path("run"), ["--run-dir", "run", "--learners", "2", "--tokens", "24000", *options])
    began = {name: own(Path("run"), name, "mean") for name in NAMES}
    # the same state goes on in a new directory, and where it was
    for goes_on in (["--resume", "run", "--run-dir", "again"], ["--run-dir", "run"]):
        meet(monkeypatch, tmp_path / f"met-{goes_on[-1]}")
        ended = diloco("up", "--plain", *goes_on)
        assert ended.code == 0, ended.err
        path = Path(goes_on[-1])
        for name in NAMES:
            assert "checkpoint_restored" in (path / "logs" / f"{name}.jsonl").read_text()
        assert diloco("verify", str(path)).code == 0
        left = Left.of(path)
        left.check(began)
        assert not left.first.any()
        values = json.loads((path / "evaluation.json").read_text())["values"]
        assert values == {"seen": pytest.approx(left.merged[0]), "steps": 0}
    replayed = diloco("replay", "run", "--learners", "--json")
    assert replayed.code == 0
    lives = json.loads(replayed.out)["learners"]
    in_jax = [life for life in lives if not life["unchecked"]]
    others = {life["learner"] for life in lives if "the training of a PyTorch learner cannot be repeated" in life["unchecked"]}
    assert {life["learner"] for life in in_jax} == set(NAMES) - others
    assert others == ({"learner-1"} if beside == "torch" else set())
    assert sum(life["parameters"] is True for life in in_jax) == len(NAMES) - len(others), lives

    meet(monkeypatch, tmp_path / "met-on")
    ended = diloco("up", "--plain", "--continue", "run", "--run-dir", "on", "--tokens", "8000", "--archive")
    assert ended.code == 0, ended.err
    on = Left.of(Path("on"))
    on.check(dict.fromkeys(NAMES, np.zeros(4)))  # each counts its steps from 0
    np.testing.assert_array_equal(on.first, left.merged)
    for command in (["verify", "on"], ["replay", "on", "--learners"]):
        assert diloco(*command).code == 0
