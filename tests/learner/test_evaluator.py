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

from diloco.core.learner.schedule import Moment
from diloco.errors import SettingsError
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.island import Island
from diloco_learner.run.evaluator import Evaluator, too_early

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

    def while_sampling(self) -> None:
        pass

    def sample(self, params: Any, key: Any, count: int) -> str:
        self.while_sampling()
        return "text"[0 if self.broken != "sample" else 9]


class FakeMember:
    """Each boundary brings a version; from the second one on a member of the task is broken, until the one that heals it."""

    map: Any
    boundaries_until_the_end = 3

    def __init__(self, task: Mine, broken: str, healed: int) -> None:
        self.task, self.broken, self.healed, self.boundaries = task, broken, healed, 0
        self.losses, self.failures = list[Any](), list[Any]()
        self.samples: list[str] = []
        self.sampled_at: list[int] = []  # boundary of each

    def boundary(self, done: None) -> Any:
        self.boundaries += 1
        self.task.broken = self.broken if 2 <= self.boundaries < self.healed else ""
        applied = SimpleNamespace(theta=np.array([self.boundaries], np.float32))
        return SimpleNamespace(applies=[(0, applied)], finished=self.boundaries == self.boundaries_until_the_end)

    def moment(self) -> Moment:
        return Moment(self.boundaries, self.boundaries_until_the_end)

    def report_evaluation(self, loss: float | None, failure: str | None) -> None:
        self.losses.append(loss)
        self.failures.append(failure)

    def report_sample(self, text: str) -> None:
        self.samples.append(text)
        self.sampled_at.append(self.boundaries)

    def wait(self, timeout_s: float) -> None:
        pass


def play(path: Path, broken: str, healed: int = 4, sample_every_s: float = 0) -> tuple[FakeMember, str]:
    """Evaluate to the end; return the member, and the error of the task's own code."""
    task = Mine()
    island, member = Island(task, SETTINGS), FakeMember(task, broken, healed)
    member.map = island.fragments()
    log, timing = get_logger(), {"sample_every_s": sample_every_s, "stopping": lambda: False}
    evaluator = Evaluator(island, member, SETTINGS, path, log, **timing)  # type: ignore[arg-type]
    try:
        evaluator.run()
    except SettingsError as error:
        return member, str(error)
    return member, ""


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "evaluation.json").read_text())
    return {key: found[key] for key in ("val_loss_initial", "val_loss", "values_initial", "values", "sample", "failure")}


RIGHT = {"val_loss_initial": 2, "val_loss": 3, "values_initial": {"hits": 1}, "values": {"hits": 1}, "sample": "t"}


def test_a_model_that_is_no_better_than_a_count_of_pairs_has_no_text_yet() -> None:
    assert too_early(2.63, 2.494) == "too early for text: loss 2.63, counting pairs of bytes gives 2.49"
    assert too_early(2.494, 2.494) is not None
    assert too_early(2.3, 2.494) is None
    assert too_early(2.63, None) is None  # on other data than text
    assert too_early(None, 2.494) is None


def test_a_sample_begins_with_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "prompt", "\n\ndef ", raising=False)
    play(tmp_path, "")
    assert saved(tmp_path)["sample"] == "def t"
    monkeypatch.setattr(Mine, "prompt", 3, raising=False)  # of a task that means something else by it
    play(tmp_path, "")
    assert saved(tmp_path)["sample"] == "t"


def test_the_first_and_the_last_model_are_saved(tmp_path: Path) -> None:
    member, said = play(tmp_path, "")
    assert (member.losses, member.failures, said) == ([1, 2, 3], [None] * 3, "")
    assert saved(tmp_path) == RIGHT | {"failure": None}


class Clock:
    """The evaluator's: 10 s pass at each boundary, ``sample_s`` with each sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sample_s: float) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("diloco_learner.run.evaluator.time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(FakeMember, "wait", lambda *_: self.passes(10.0))
        monkeypatch.setattr(Mine, "while_sampling", lambda _: self.passes(sample_s))

    def passes(self, time_s: float) -> None:
        self.now_s += time_s


def test_samples_are_told_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMember, "boundaries_until_the_end", 12)
    Clock(monkeypatch, 0.0)
    assert play(tmp_path, "", sample_every_s=0)[0].samples == []
    # the second boundary, at 10 s, has a tenth of the tokens, the sixth a half; others come 30 s after the one before
    assert play(tmp_path, "", sample_every_s=30)[0].sampled_at == [2, 5, 6, 9]


def test_samples_that_take_long_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMember, "boundaries_until_the_end", 12)
    Clock(monkeypatch, 1.0)
    # a tenth and a half of the tokens at 10 and 51 s; by the clock the next one may 50 s after the last one began
    assert play(tmp_path, "", sample_every_s=10)[0].sampled_at == [2, 6, 11]


def test_an_error_of_sample_in_mid_run_is_told_and_the_evaluator_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 0.0)
    member, said = play(tmp_path, "sample", sample_every_s=5)
    assert said.startswith("task.name = 'mine:make': IndexError: string index out of range")
    assert (member.losses, member.failures) == ([1, 2, 2, 3], [None, None, said, None])
    assert saved(tmp_path) == RIGHT | {"sample": None, "failure": said}


@pytest.mark.parametrize(
    ("broken", "error", "losses", "failed", "last"),
    [
        # what evaluate() does not find is missing, and nothing else
        ("evaluate", r"ZeroDivisionError: integer division or modulo by zero", [1, 2, 3], 2, {"values": {}}),
        ("validation", r"OSError: the file is gone", [1, 1, 1], 2, {"val_loss": 1}),
        ("sample", r"IndexError: string index out of range", [1, 2, 3], 0, {"sample": None}),
    ],
)
def test_an_error_of_the_task_s_own_code_is_named_and_nothing_is_lost(
    tmp_path: Path, broken: str, error: str, losses: list[float], failed: int, last: dict[str, Any]
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
    assert member.failures == [None] * (3 - failed) + [said] * failed
    assert saved(tmp_path) == RIGHT | {"failure": said} | last


def test_an_error_that_is_over_is_forgotten(tmp_path: Path) -> None:
    member, said = play(tmp_path, "evaluate", healed=3)
    assert (member.losses, [failure is None for failure in member.failures]) == ([1, 2, 3], [True, False, True])
    assert said == ""
    assert saved(tmp_path) == RIGHT | {"failure": None}
