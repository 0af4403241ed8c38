"""``python -m diloco_learner.examine``: all that ``diloco check`` says of a task, beyond what stands in the way of a run.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "processes": ...}`` from stdin. The last line on stdout is an
:class:`diloco_learner.api.examination.TaskExamination` as JSON. What makes a run fail is an error
(:mod:`diloco_learner.check`, which ``diloco up`` asks too). What a run gets through, and its user hardly wants, is a
warning: a step that is another one each time, batches that do not depend on their number alone, data that repeat, tensors that
nothing trains, constants that are compiled in.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import MeshSettings
from diloco.settings.validation import parse
from diloco_learner.api.examination import TaskExamination
from diloco_learner.check import PlannedRun, checked


def examine(
    settings: RunSettings, data: str | None, mesh: MeshSettings | None = None, processes: int | None = None
) -> TaskExamination:
    """Make a task, and take its first step twice.

    ``processes``: of a learner that computes with PyTorch, which the task is looked at for, too, with the ``mesh`` over them.

    Raises:
        SettingsError: it cannot be trained, as :func:`diloco_learner.check.check` raises.
        DataError: its data is missing, unreadable or too short.
    """
    made = checked(PlannedRun(settings, data, mesh, processes))
    task, framework = made.loaded.task, made.loaded.framework
    found = framework.examine(task, settings, made.model, made.batches, made.found.units)
    return dataclasses.replace(found, framework=framework.name, devices=framework.devices(), processes=made.processes)


def _main() -> None:
    request = json.load(sys.stdin)
    mesh = None if request["mesh"] is None else parse(MeshSettings, request["mesh"], "mesh")
    settings = parse(RunSettings, request["settings"], "the run")
    found = examine(settings, request["data"], mesh, request["processes"])
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
