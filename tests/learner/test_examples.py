"""The tasks in ``examples/``: each is fit to train, and a few steps of it make its loss smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.settings.presets import run_settings
from diloco_learner.check import PlannedRun, check
from diloco_learner.jax.island import Island
from diloco_learner.task import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


LIBRARIES = {"flax_nnx": "flax", "flax_batchnorm": "flax", "equinox_mlp": "equinox", "haiku_resnet": "haiku"}


@pytest.mark.parametrize(
    ("name", "overrides", "values"),
    [
        ("lora", {}, set()),
        pytest.param(
            "vision_transformer",
            {"task.layers": 1, "task.width": 32, "task.heads": 2, "inner.optimizer": "muon"},
            set(),
            marks=pytest.mark.slow,
        ),
        pytest.param("mixture_of_experts", {"inner.optimizer": "muon"}, {"val/busiest"}, marks=pytest.mark.slow),
        pytest.param("flax_nnx", {"task.width": 8}, set(), marks=pytest.mark.slow),
        pytest.param("flax_batchnorm", {"task.width": 8}, set(), marks=pytest.mark.slow),
        pytest.param("equinox_mlp", {"task.width": 64}, set(), marks=pytest.mark.slow),
        pytest.param("haiku_resnet", {"task.width": 8}, set(), marks=pytest.mark.slow),
        ("own_model", {"task.width": 16, "task.context": 8}, set()),
        (
            "classifier",
            {"task.options.width": 32},
            {"val_loss/usual", "val/usual/accuracy", "val_loss/noisy", "val/noisy/accuracy"},
        ),
    ],
)
def test_an_example_trains(monkeypatch: pytest.MonkeyPatch, name: str, overrides: dict[str, Any], values: set[str]) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is missing: `make extras` installs it")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    settings = run_settings(
        overrides={"inner.optimizer": "adamw", "fragments.count": 8, "task.name": f"{name}:make"} | overrides
    )
    check(PlannedRun(settings))
    task = load_task(settings.task, None)
    island, batches = Island(task, settings), task.batches(0, 4, 0, 0)
    before = island.evaluation()
    for index in range(20):
        island.step(next(batches), 0.02, (0, index)).wait()
    after = island.evaluation()
    assert before.loss is not None
    assert after.loss is not None
    assert after.loss < before.loss
    assert after.values.keys() == values
