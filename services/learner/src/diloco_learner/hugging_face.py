"""``python -m diloco_learner.hugging_face``: a task's names and configuration for Hugging Face's libraries.

Reads ``{"settings": ..., "data": ...}`` from stdin. Prints ``{"names": ..., "config": ..., "adapter_config": ..., "files":
...}``: the task's members of these names, null where it has none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco_learner import frameworks
from diloco_learner.api import members
from diloco_learner.task_api import said_of_files

MEMBERS = ("names", "config", "adapter_config", "files")


def said(settings: RunSettings, data: str | None) -> dict[str, Any]:
    """Return the names map and the configuration of a run's model, that of its adapter, and the files beside its weights.

    Raises:
        SettingsError: one of them is no mapping that JSON has; or the task cannot be made.
        DataError: its data is missing, unreadable or too short.
    """
    with members.users_errors(settings.task):
        task = frameworks.load(settings.task, data, LearnerSettings(name="files").cache_dir).task
        return {member: said_of_files(task, member) for member in MEMBERS}


def _main() -> None:
    request = json.load(sys.stdin)
    print(json.dumps(said(parse(RunSettings, request["settings"], "the run"), request["data"])))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
