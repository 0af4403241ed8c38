"""The evaluator and errors of a user's code: they are named with file and line, and the losses found until then are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.errors import SettingsError
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.evaluator import Evaluator
from diloco_learner.island import Island

SETTINGS: RunSettings = run_settings(overrides={"shards": 1, "fragments.count": 1, "task.name": "mine:make"})


class Mine:
    """Its loss is its parameter; a value that the log has taken to ``fails`` breaks a member of it."""

    tokens_per_batch, evaluate_every_s, broken = 1, 1e-9, ""

    def init(self, key: jax.Array) -> Any:
        return {"x": jnp.float32(2)}

    def loss(self, params: Any, batch: Any) -> Any:
        return params["x"] * batch

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            yield np.float32(1)

    def validation(self) -> Any:
        if self.broken == "validation":
            raise OSError("the file is gone")
        return [np.float32(1)]

    def evaluate(self, params: Any) -> Any:
        return {"hits": 1 // (self.broken != "evaluate")}

    def sample(self, params: Any, key: Any, count: int) -> str:
        return "text"[0 if self.broken != "sample" else 9]


class FakeMember:
    """Each boundary brings a version; before the second one a member of the task breaks."""

    map: Any

    def __init__(self, task: Mine, broken: str) -> None:
        self.task, self.broken, self.losses, self.boundaries = task, broken, list[Any](), 0

    def boundary(self, done: None) -> Any:
        self.boundaries += 1
        if self.boundaries == 2:
            self.task.broken = self.broken
        applied = SimpleNamespace(theta=np.array([self.boundaries], np.float32))
        return SimpleNamespace(applies=[(0, applied)], finished=self.boundaries == 3)

    def report_loss(self, loss: float | None) -> None:
        self.losses.append(loss)

    def wait(self, timeout_s: float) -> None:
        pass


def play(path: Path, broken: str) -> tuple[FakeMember, str]:
    """Evaluate to the end; return the member, and the error of the task's own code."""
    task = Mine()
    island, member = Island(task, SETTINGS), FakeMember(task, broken)
    member.map = island.fragments()
    evaluator = Evaluator(island, member, SETTINGS, path, get_logger(), stopping=lambda: False)  # type: ignore[arg-type]
    try:
        evaluator.run()
    except SettingsError as error:
        return member, str(error)
    return member, ""


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "evaluation.json").read_text())
    return {key: found[key] for key in ("val_loss_initial", "val_loss", "values_initial", "values", "sample")}


def test_the_first_and_the_last_model_are_saved(tmp_path: Path) -> None:
    member, said = play(tmp_path, "")
    assert (member.losses, said) == ([1, 2, 3], "")
    values = {"val_loss_initial": 2, "val_loss": 3, "values_initial": {"hits": 1}, "values": {"hits": 1}, "sample": "t"}
    assert saved(tmp_path) == values


@pytest.mark.parametrize(
    ("broken", "error", "losses", "last"),
    [
        # what was found before evaluate() raised is told and saved: the second version's loss
        ("evaluate", r"ZeroDivisionError: integer division or modulo by zero", [1, 2], (2, {})),
        ("validation", r"OSError: the file is gone", [1, 1], (1, {"hits": 1})),
        ("sample", r"IndexError: string index out of range", [1, 2, 3], (3, {"hits": 1})),
    ],
)
def test_an_error_of_the_task_s_own_code_is_named_and_nothing_is_lost(
    tmp_path: Path, broken: str, error: str, losses: list[float], last: tuple[float, dict[str, float]]
) -> None:
    member, said = play(tmp_path, broken)
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if f'self.broken != "{broken}"' in text or ("raise OSError" in text and broken == "validation")
    )
    assert said.startswith(f"task.name = 'mine:make': {error} (")
    assert said.endswith(f"test_evaluator.py, line {line})")
    assert member.losses == losses
    assert saved(tmp_path) == {
        "val_loss_initial": 2,
        "val_loss": last[0],
        "values_initial": {"hits": 1},
        "values": last[1],
        "sample": None,
    }
