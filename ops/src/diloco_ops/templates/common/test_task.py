"""The task can be trained, as `diloco check` sees it: python -m pytest."""

from settings import SETTINGS

from diloco.settings.presets import run_settings
from diloco_learner.examine import examine


def test_the_task_is_fit() -> None:
    found = examine(run_settings(overrides=SETTINGS | {"task.name": "task:make"}), None)
    assert found.warnings == []
