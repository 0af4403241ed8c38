"""Trials on a tiny model."""

from __future__ import annotations

from typing import Any

from diloco.settings.presets import run_settings
from diloco_lab.paces.times import Paces, steady
from diloco_lab.trial import Result, Trial
from diloco_learner.task import load_task

TINY_TRIAL: dict[str, Any] = {
    "learners": 2,
    "shards": 1,
    "task.layers": 1,
    "task.width": 16,
    "task.heads": 2,
    "task.context": 16,
    "task.batch": 4,
    "fragments.count": 2,
    "round.steps": 4,
}
STEP_TOKENS = 4 * 16


def play_tiny(text: str, tokens: int, paces: Paces | None = None, preset: str = "decoupled", **changes: Any) -> Result:
    settings = run_settings(preset, TINY_TRIAL | {"tokens": tokens} | changes)
    return Trial(settings, load_task(settings.task, text), paces or Paces([steady(0.1), steady(0.1)])).play()
