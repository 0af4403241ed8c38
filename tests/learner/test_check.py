"""A task and its data before a run begins: each mistake is named with the task, the thing that came, and the remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.errors import DataError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.service import MeshSettings
from diloco_learner.check import PlannedRun, TaskFacts, check

TASK = """
import itertools
import json
import jax
import jax.numpy as jnp
import optax
from diloco_learner.task import Aux

class Mine:
    tokens_per_batch = 4
    def init(self, key): return {"weight": jnp.ones((2, 3))}
    def loss(self, params, batch): return jnp.sum(params["weight"]) * batch
    def batches(self, share, shares, seed, start): return itertools.repeat(jnp.float32(1))
    def validation(self): return [jnp.float32(1)]
    def is_embedding(self, path): return False

class AuxiliaryLoss(Mine):
    def loss(self, params, batch): return super().loss(params, batch), {"accuracy": 1}

class WithAux(Mine):
    def loss(self, params, batch, *, key, train):
        assert isinstance(train, bool)
        return super().loss(params, batch) + jax.random.normal(key), Aux({"accuracy": jnp.mean(batch > 0)})

class Unknown(Mine):
    def loss(self, params, batch, *, keys): return super().loss(params, batch)

class ThreeParts(Mine):
    def loss(self, params, batch): return super().loss(params, batch), Aux(), 3

class MetricOfEach(Mine):
    def loss(self, params, batch): return super().loss(params, batch), Aux({"weight": params["weight"]})

class MetricNamed(Mine):
    def loss(self, params, batch): return super().loss(params, batch), Aux({"Top-1": 1.0})

class ManyMetrics(Mine):
    def loss(self, params, batch): return super().loss(params, batch), Aux({f"m{i}": 1.0 for i in range(33)})

class OnlyInValidation(Mine):
    def loss(self, params, batch, *, train): return super().loss(params, batch) if train else params["weight"]

class Changing(Mine):
    def batches(self, share, shares, seed, start):
        return ({"x": jnp.ones((4, 2 + number))} for number in itertools.count())
    def loss(self, params, batch): return jnp.sum(params["weight"]) * jnp.mean(batch["x"])

class OneBatch(Mine):
    def batches(self, share, shares, seed, start): return iter([jnp.float32(1)])

class LossOfEach(Mine):
    def loss(self, params, batch): return params["weight"]

class NoBatches(Mine):
    def batches(self, share, shares, seed, start): return iter(())

class NothingHeldOut(Mine):
    def validation(self): return []

class Rounded(Mine):
    def init(self, key): return {"weight": jnp.ones((2, 3), jnp.bfloat16)}

class RoundedLoss(Rounded):
    def loss(self, params, batch): return jnp.sum(params["weight"])

class HalfPrecision(Mine):
    def init(self, key): return {"weight": jnp.ones((2, 3), jnp.float16)}

class Broken(Mine):
    def loss(self, params, batch): return params["wieght"]

class Counter(Mine):
    def init(self, key): return {"weight": jnp.ones((2, 3)), "steps": jnp.int32(0)}

class Short(Mine):
    def batches(self, share, shares, seed, start): return itertools.repeat(jnp.float32(1), 20 - start)

class LastOfAnEpoch(Changing):
    def batches(self, share, shares, seed, start):
        return ({"x": jnp.ones((4 - (number == 30), 2))} for number in itertools.count())

class NotANumber(Mine):
    def loss(self, params, batch): return super().loss(params, batch) + jnp.log(-jnp.sum(params["weight"]))

class NoGradient(Mine):
    def init(self, key): return {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    def loss(self, params, batch): return super().loss(params, batch) + jnp.sum(jnp.sqrt(params["bias"]))

class Beyond(Mine):
    def loss(self, params, batch): return super().loss(params, batch) + jnp.take(params["weight"], 7)

class Words(Mine):
    tokens_per_batch = "4"

class Elsewhere(Mine):
    def init(self, key): return json.loads("weights")  # fails in Python's own code

class NoWhere(Mine):
    def batches(self, share, shares, seed, start): return [jnp.float32(1)] * 9

class Text(Mine):
    def batches(self, share, shares, seed, start): return itertools.repeat({"x": jnp.float32(1), "text": ["a", "b"]})

class Searching(Mine):
    def optimizer(self, rate): return optax.lbfgs()  # wants the loss

class Nothing(Mine):
    def init(self, key): return {}

class Leaving(Mine):
    def __init__(self): raise SystemExit("no corpus")
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TaskFacts]:
    """``checked(name)``: check the task of that name, whose data no file holds."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    names = re.findall(r"^class (\w+)", TASK, re.MULTILINE)
    makers = "".join(f"def make{name}(settings, data): return {name}()\n" for name in names)
    (tmp_path / "mine.py").write_text(TASK + makers)
    small = {"shards": 1, "fragments.count": 2}
    return lambda name: check(PlannedRun(run_settings(overrides=small | {"task.name": f"mine:make{name}"}), "hf://corpus"))


@pytest.mark.parametrize("name", ["Mine", "Rounded", "WithAux"])
def test_a_task_that_is_right(checked: Callable[[str], TaskFacts], name: str) -> None:
    checked(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "AuxiliaryLoss",
            r"returned a tuple of float32\[\], a dict, expected a float32 scalar: return only the mean loss of",
        ),
        (
            "ThreeParts",
            r"loss\(\) returned a tuple of float32\[\], a Aux, a int, expected a float32 scalar.* \(.*mine\.py, line 29\)",
        ),
        (
            "Unknown",
            r"loss\(\) requires 'keys', which diloco does not pass: beyond its first 2 arguments it may have key, train, "
            r".*line 26\)",
        ),
        (
            "MetricOfEach",
            r"loss\(\) returned metric 'weight' as float32\[2, 3\], expected a scalar, the mean of its rows \(.*line 32",
        ),
        ("MetricNamed", "returned a metric named 'Top-1', expected 1 to 48 lower-case letters, digits and _"),
        ("ManyMetrics", "returned 33 metrics, expected at most 32"),
        ("OnlyInValidation", r"loss\(\) returned float32\[2, 3\], expected a float32 scalar"),
        (
            "Changing",
            r"batches\(\) gave x as float32\[4, 2\] and then as float32\[4, 3\]: batches have the same shapes each time \(",
        ),
        ("OneBatch", r"batches\(\) of share 0 ended before batch 1; batches\(\) must not end"),
        ("LossOfEach", r"loss\(\) returned float32\[2, 3\], expected a float32 scalar"),
        ("NoBatches", r"batches\(\) of share 0 ended before batch 0; batches\(\) must not end"),
        ("NothingHeldOut", r"validation\(\) returned no batch; give at least one"),
        ("RoundedLoss", r"loss\(\) returned bfloat16\[\], expected a float32 scalar: cast logits to float32 before the loss"),
        ("HalfPrecision", "parameter 'weight' is float16, expected float32 or bfloat16: gradients below 6e-8 .* use bfloat16"),
        ("Broken", r"KeyError: 'wieght' \(.*mine\.py, line 70\)"),
        ("Counter", r"parameter 'steps' is int32, expected float32 or bfloat16: .* \(.*mine\.py, line 73\)"),
        ("Short", r"batches\(\) of share 0 ended before batch 20; batches\(\) must not end: .* \(.*mine\.py, line 76\)"),
        ("LastOfAnEpoch", r"batches\(\) gave x as float32\[4, 2\] and then as float32\[3, 2\]: .* \(.*mine\.py, line 79\)"),
        ("NotANumber", r"loss\(\) of the first batch is nan: no step is taken with NaN or infinity \(.*mine\.py, line 83\)"),
        ("NoGradient", r"loss\(\) of the first batch is 6, and its gradient of 'bias' is NaN or infinity: .* line 87\)"),
        ("Beyond", r"first batch is nan, since index 7 is out of bounds for axis 0 with size 6, in an array of shape \(6,\): "),
        ("Words", r"tokens_per_batch = '4', expected an int above 0 \(.*mine\.py, line 92\)"),
        ("Elsewhere", r"JSONDecodeError: Expecting value: line 1 column 1 \(char 0\) \(.*mine\.py, line 96\)"),
        ("NoWhere", r"TypeError: 'list' object is not an iterator \(.*mine\.py, line 99\)"),
        ("Text", r"batches\(\) gave text/0 as a str, expected an array of numbers \(.*mine\.py, line 102\)"),
        ("Searching", r"TypeError: .* missing 3 required keyword-only arguments: .* \(.*mine\.py, line 105\)"),
        ("Nothing", r"the model has no parameters that are trained \(.*mine\.py, line 108\)"),
        ("Leaving", r"SystemExit: no corpus \(.*mine\.py, line 111\)"),
        ("Missing", "'makeMissing' does not exist in mine"),
    ],
)
def test_a_task_that_is_not(checked: Callable[[str], TaskFacts], name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        checked(name)


def test_a_mesh_that_does_not_fit_is_found_of_the_built_in_task_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 200)
    settings = run_settings(overrides={"learners": 2, "task.context": 8, "task.batch": 2, "task.layers": 1, "task.width": 16})
    with pytest.raises(SettingsError, match=r"mesh\.fsdp = 4 .* are 4 devices, and JAX gives this learner 1 \(cpu\)"):
        check(PlannedRun(settings, str(text), MeshSettings(fsdp=4)))


def test_the_built_in_task_s_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    settings = run_settings(overrides={"learners": 2, "task.context": 8, "task.batch": 2})
    text.write_text("some words\n" * 200)
    check(PlannedRun(settings, str(text)))
    text.write_text("too few")
    with pytest.raises(DataError, match="one batch of 2 windows of 8 bytes"):
        check(PlannedRun(settings, str(text)))
    with pytest.raises(DataError, match="there is no such file or folder"):
        check(PlannedRun(settings, "corpus"))
    with pytest.raises(SettingsError, match="hf://corpus: names no repository"):
        check(PlannedRun(settings, "hf://corpus"))
