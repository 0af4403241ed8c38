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
from diloco_learner.check import check

TASK = """
import itertools
import jax.numpy as jnp

class Mine:
    tokens_per_batch = 4
    def init(self, key): return {"weight": jnp.ones((2, 3))}
    def loss(self, params, batch): return jnp.sum(params["weight"]) * batch
    def batches(self, share, shares, seed, start): return itertools.repeat(jnp.float32(1))
    def validation(self): return [jnp.float32(1)]
    def is_embedding(self, path): return False

class AuxiliaryLoss(Mine):
    def loss(self, params, batch): return super().loss(params, batch), {"accuracy": 1}

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
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``checked(name)``: check the task of that name, whose data no file holds."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    names = re.findall(r"^class (\w+)", TASK, re.MULTILINE)
    makers = "".join(f"def make{name}(settings, data): return {name}()\n" for name in names)
    (tmp_path / "mine.py").write_text(TASK + makers)
    return lambda name: check(run_settings(overrides={"task.name": f"mine:make{name}"}), "hf://corpus")


@pytest.mark.parametrize("name", ["Mine", "Rounded"])
def test_a_task_that_is_right(checked: Callable[[str], None], name: str) -> None:
    checked(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("AuxiliaryLoss", r"loss\(\) returned a tuple, expected a float32 scalar: return the mean loss"),
        ("LossOfEach", r"loss\(\) returned float32\[2, 3\], expected a float32 scalar"),
        ("NoBatches", r"batches\(\) of share 0 ended before batch 0; they go on without end"),
        ("NothingHeldOut", r"validation\(\) returned no batch; give at least one"),
        ("RoundedLoss", r"loss\(\) returned bfloat16\[\], expected a float32 scalar: cast logits to float32 before the loss"),
        ("HalfPrecision", "parameter 'weight' is float16, expected float32 or bfloat16: gradients below 6e-8 .* use bfloat16"),
        ("Broken", r"KeyError: 'wieght' \(.*mine\.py, line 35\)"),
        ("Nobody", "'makeNobody' does not exist in mine"),
    ],
)
def test_a_task_that_is_not(checked: Callable[[str], None], name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        checked(name)


def test_a_mesh_that_does_not_fit_is_found_of_the_built_in_task_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 200)
    settings = run_settings(overrides={"learners": 2, "task.context": 8, "task.batch": 2, "task.layers": 1, "task.width": 16})
    with pytest.raises(SettingsError, match=r"mesh\.fsdp = 4 .* are 4 devices, and JAX gives this learner 1 \(cpu\)"):
        check(settings, str(text), MeshSettings(fsdp=4))


def test_the_built_in_task_s_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    settings = run_settings(overrides={"learners": 2, "task.context": 8, "task.batch": 2})
    text.write_text("some words\n" * 200)
    check(settings, str(text))
    text.write_text("too few")
    with pytest.raises(DataError, match="one batch of 2 windows of 8 bytes"):
        check(settings, str(text))
    with pytest.raises(DataError, match="there is no such file or folder"):
        check(settings, "hf://corpus")
