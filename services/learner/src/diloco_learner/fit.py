"""``python -m diloco_learner.fit``: find out whether a learner's mesh fits, and what its processes have to agree on.

Reads ``{"learner": ..., "run": ...}`` from stdin: the settings of a learner, and those of its run (null: not known yet).
Writes a :class:`DeviceFit` as JSON. Tensors are shapes alone here, so a model may be larger than this host. Each of a learner's
processes is taken to have as many devices as this one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import cast

import jax

from diloco.control.creation import KnownRun
from diloco.errors import SettingsError
from diloco.nats.registry import Registry
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco_learner.jax import agreement
from diloco_learner.jax.mesh import axis_sizes
from diloco_learner.task import load_task
from diloco_learner.task_api import first_batch


@dataclass(frozen=True)
class DeviceFit:
    """The devices of this process, the mesh of all, and what has to be the same in all processes.

    Attributes:
        wrong: why the learner would be refused; empty: it would not be.
    """

    devices: int
    platform: str
    mesh: dict[str, int]
    facts: dict[str, str]
    wrong: str = ""


def fit(settings: LearnerSettings, run: RunSettings | None) -> DeviceFit:
    """Look at the devices; with a run's settings, at its task's tensors and first batch, too.

    Raises:
        DilocoError: the run's task or data are not fit to train on.
    """
    devices, count = jax.devices(), settings.processes.count
    facts: dict[str, object] = {}
    mesh: dict[str, int] = {}
    wrong = ""
    try:
        if count > 1:
            agreement.check(settings)
        mesh = axis_sizes(settings.mesh, count * len(devices), devices[0].platform)
        if run is not None:
            task = load_task(run.task, settings.data, settings.cache_dir)
            first = first_batch(task, run)
            facts |= agreement.first_facts(settings, KnownRun(settings.run, run, cast(Registry, None)))  # which is not asked
            facts |= agreement.model_facts(None, task, run, first) | {"mesh": mesh}
            agreement.check_meshes(settings, task, run, first)
    except SettingsError as error:
        wrong = str(error)
    return DeviceFit(len(devices), devices[0].platform, mesh, {name: str(value) for name, value in facts.items()}, wrong)


def _main() -> None:
    request = json.load(sys.stdin)
    run = None if request["run"] is None else parse(RunSettings, request["run"], "the run")
    print(json.dumps(asdict(fit(LearnerSettings(**request["learner"]), run))))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
