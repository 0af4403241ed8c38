"""What ``diloco check`` finds: each fault that a run would get through is a warning, one that ends it an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_learner.api.examination import TaskExamination
from diloco_learner.examine import examine

TASK = """
import itertools
import jax
import jax.numpy as jnp
import numpy as np
from diloco_learner.task import Aux

TABLE = np.ones((600, 500), np.float32)  # 1.2 MB
COUNTER = itertools.count()

class Mine:
    tokens_per_batch = 4
    def init(self, key): return {"embed": jnp.ones((3, 2)), "weight": jax.random.normal(key, (4, 2)), "bias": jnp.zeros(4)}
    def loss(self, params, batch):
        return jnp.mean((batch @ params["weight"].T + params["bias"]) ** 2) + jnp.sum(params["embed"] ** 2)
    def batch(self, share, number): return np.random.default_rng((share, number)).normal(size=(4, 2)).astype(np.float32)
    def batches(self, share, shares, seed, start): return (self.batch(share, number) for number in itertools.count(start))
    def is_embedding(self, path): return path == "embed"

class Still(Mine):
    def loss(self, params, batch): return jnp.mean((batch @ params["weight"].T) ** 2) + jnp.sum(params["embed"] ** 2)

class Closed(Mine):
    def loss(self, params, batch): return super().loss(params, batch) + jnp.sum(jnp.asarray(TABLE)[:2, :2]) * params["bias"][0]

class Changing(Mine):
    def batch(self, share, number): return super().batch(share, next(COUNTER))

class Fixed(Mine):
    def batch(self, share, number): return super().batch(0, number)

class Deaf(Mine):
    def batches(self, share, shares, seed, start): return super().batches(share, shares, seed, 0)

class Same(Mine):
    def batch(self, share, number): return super().batch(share, 0)

class Short(Mine):
    def batches(self, share, shares, seed, start): return itertools.islice(super().batches(share, shares, seed, start), 20)

class Unsteady(Mine):
    def loss(self, params, batch):
        def outside(): return np.float32(next(COUNTER))
        noise = jax.pure_callback(outside, jax.ShapeDtypeStruct((), jnp.float32))
        return super().loss(params, batch) + jax.lax.stop_gradient(noise)

class Kept(Mine):
    def init_state(self, key): return {"mean": jnp.zeros(2), "steps": jnp.int32(0)}
    def loss(self, params, batch, *, state):
        after = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch, 0), "steps": state["steps"] + 1}
        return super().loss(params, batch - state["mean"]), Aux(state=after)

class Counted(Mine):
    made = first = 0
    def __init__(self): Counted.made += 1
    def batch(self, share, number):
        Counted.first += (share, number) == (0, 0)
        return super().batch(share, number)

class Beyond(Mine):
    def loss(self, params, batch): return super().loss(params, batch) + params["embed"][jnp.arange(2, 4)].sum()

class Mute(Mine):
    def sample(self, params, key, count): return "".join(chr(int(each)) for each in params["words"])

class NotANumber(Mine):
    def loss(self, params, batch): return jnp.log(-1.0 - jnp.sum(params["weight"] ** 2)) + super().loss(params, batch)
"""
SMALL = {"shards": 1, "fragments.count": 3, "learners": 2, "inner.optimizer": "adamw"}


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TaskExamination]:
    """``examined(name)``: examine the task of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(TASK + "\ndef maker(name): return lambda settings, data: globals()[name]()\n")
    names = [line.split()[1].split("(")[0].rstrip(":") for line in TASK.splitlines() if line.startswith("class")]
    with (tmp_path / "own.py").open("a") as file:
        file.writelines(f"make{name} = maker({name!r})\n" for name in names)
    return lambda name: examine(run_settings(overrides=SMALL | {"task.name": f"own:make{name}"}), None)


def test_a_task_that_is_right_is_described(examined: Callable[[str], TaskExamination]) -> None:
    found = examined("Mine")
    assert found.warnings == []
    assert [(tensor.path, tensor.shape, tensor.merge, tensor.matrices) for tensor in found.tensors] == [
        ("bias", [4], "one norm", 0),
        ("embed", [3, 2], "average", 0),
        ("weight", [4, 2], "row: 4 norms", 1),
    ]
    assert found.parameters == 18
    assert sum(fragment["parameters"] for fragment in found.fragments) == 18
    assert {index for tensor in found.tensors for index in tensor.fragments} == {0, 1, 2}
    assert found.memory["arguments"] >= 18 * 4 * 3 + 8 * 4  # parameters, two moments, and the batch
    assert found.loss > 0


def test_what_each_strategy_would_make_of_the_model_is_said(examined: Callable[[str], TaskExamination]) -> None:
    # embed has 6 values, and so one of 3 fragments; of the others bias has 4, and weight 8
    found = {each.strategy: each for each in examined("Mine").strategies}
    sizes = {name: (each.fragments, each.smallest_bytes, each.largest_bytes) for name, each in found.items()}
    # balanced cuts weight into two of 4, of which one shares a fragment with bias
    assert sizes["balanced"] == sizes["strided"] == sizes["layer"] == (3, 16, 32)
    assert sizes["layers"] == sizes["tensors"] == (0, 0, 0)
    assert "no layers found in the model" in found["layers"].refusal


def test_the_rule_of_each_array_of_a_state_is_said(examined: Callable[[str], TaskExamination]) -> None:
    found = examined("Kept")
    assert found.warnings == []
    assert [(array.path, array.shape, array.dtype, array.fragments, array.merge) for array in found.state] == [
        ("mean", [2], "float32", [2], "average"),
        ("steps", [], "int32", [], "local"),
    ]
    assert found.parameters == 18
    assert found.fragments[2] == {"index": 2, "parameters": 2, "offer_bytes": 8}


def test_a_task_and_its_first_batch_are_made_once(examined: Callable[[str], TaskExamination]) -> None:
    assert examined("Counted").warnings == []
    own = sys.modules["own"].Counted
    assert (own.made, own.first) == (1, 2)  # and the first batch again, to see whether it is the same


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Still", "tensor 'bias' has no gradient: the loss of the first batch does not depend on it ("),
        ("Closed", "the loss has closed over an array float32[600, 500] of 1 MB, which is compiled into the program"),
        ("Changing", "batches() returns other batches when it is called again"),
        ("Fixed", "shares 0 and 1 begin with the same batch: learners train on the same data ("),
        ("Deaf", "batches(start=1) does not begin with the second batch"),
        ("Same", "batches() gives the same batch twice, the first and the second of share 0"),
        ("Mute", "sample() fails, so that the run's end has no text: task.name = 'own:makeMute': KeyError: 'words' ("),
        ("Unsteady", "the same step gives two results (losses "),
        (
            "Beyond",
            "which then reads another element: index 3 is out of bounds for axis 0 with size 3, in an array of shape (3, 2)",
        ),
    ],
)
def test_faults_that_a_run_would_get_through(examined: Callable[[str], TaskExamination], name: str, said: str) -> None:
    [warning] = examined(name).warnings
    assert said in warning


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Short", r"batches\(\) of share 0 ended before batch 20; batches\(\) must not end"),
        (
            "NotANumber",
            r"loss\(\) of the first batch is nan: no step is taken with NaN or infinity \(.*own\.py",
        ),
    ],
)
def test_faults_that_end_a_run(examined: Callable[[str], TaskExamination], name: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        examined(name)
