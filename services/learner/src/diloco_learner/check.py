"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "processes": ..., "init": ..., "names": ..., "map": ..., "whole": ...}``
from stdin. The built-in task is known to be right, so that only its data is looked at, without JAX, which takes a second to
import, unless learners are to have a mesh (``mesh`` is not null), the run begins with weights (``init``), or its fragment map
is asked for (``whole``). The last line on stdout is a :class:`TaskFacts` as JSON, with that ``map``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.core.tensors.built_in import BUILT_IN
from diloco.core.tensors.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import SettingsError
from diloco.process import observe
from diloco.settings.run import MixSettings, RunSettings
from diloco.settings.service import LearnerSettings, MeshSettings
from diloco.settings.validation import parse
from diloco_learner import frameworks
from diloco_learner.api import members, options
from diloco_learner.chats.chats import Chats
from diloco_learner.data.data import open_data
from diloco_learner.frameworks import Framework, LoadedTask
from diloco_learner.mix.mix import Mix
from diloco_learner.task_api import first_batches, units_of

if TYPE_CHECKING:
    from diloco_learner.api.examination import ProcessFacts
    from diloco_learner.api.model import Model

LOOK_BATCHES, LOOK_S = 64, 1.0  # looked at for their end: so many, or for so long, so that the check stays short


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to begin, as far as its task concerns it.

    ``init``, ``names``: the file or folder of the weights that it begins with, and the file of their names.
    ``fragment_map``: of the run that it continues. ``processes``: of each learner that computes with PyTorch.
    """

    settings: RunSettings
    data: str | None = None
    mesh: MeshSettings | None = None
    processes: int | None = None
    init: str | None = None
    names: Path | None = None
    fragment_map: FragmentMap | None = None


@dataclass(frozen=True)
class TaskFacts:
    """Facts of a task that is fit.

    ``step_tokens``: of one step of a learner. ``units``: of the loss; None: it does not say. ``framework``: the name of the
    framework that computes it. ``mix``: its mix of data as the run's settings are to have it, if that is one. ``notes``:
    sentences about what its data leaves out.
    """

    step_tokens: int
    units: str | None
    framework: str
    mix: MixSettings | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A task that is fit, and all that was made to find that out: its model, and the first two batches of the first share.

    ``processes``: what the first of a learner of several has, if that was asked about.
    """

    found: TaskFacts
    loaded: LoadedTask
    model: Model
    batches: list[Any]
    processes: ProcessFacts | None


def check(plan: PlannedRun) -> TaskFacts:
    """Make what a learner and the evaluator make before the first step.

    Raises:
        AdmissionError: the model is not that of the run that this one continues; the first differing tensor is named. Or the
            mix is not the run's.
        SettingsError: the task lacks something, one of its methods fails, or returns something else than a task's; or the mesh
            does not fit the devices, the tensors or the batches; or the file of weights does not fit the model; or learners
            with JAX cannot write their ``cache_dir``.
        DataError: its data is missing, unreadable or too short.
    """
    settings, cache_dir = plan.settings, LearnerSettings(name="check").cache_dir  # with what DILOCO_* says, as learners have it
    if settings.task.name == BUILT_IN:
        options.refuse(settings.task.options, options.BUILT_IN)
        own = open_data(settings.task, plan.data, cache_dir)
        next(own.batches(0, settings.learners, settings.seed, 0))
        own.validation()
        # its model follows from the settings, and from a mix
        if plan.mesh is None and plan.init is None and not (isinstance(own, Mix) and plan.fragment_map):
            framework = frameworks.claimant(None, settings.task)
            framework.check_cache(cache_dir)
            return _found(settings, settings.task.tokens_per_batch, own.units, own, framework)
    made = checked(plan)
    made.loaded.framework.check_cache(cache_dir)
    return made.found


def checked(plan: PlannedRun) -> Checked:
    """Return the same as :func:`check`, of the built-in task too, with all that was made; raise as it does."""
    from diloco_learner.run import weights

    settings, cache_dir = plan.settings, LearnerSettings(name="check").cache_dir
    with members.users_errors(settings.task):
        loaded = frameworks.load(settings.task, plan.data, cache_dir)
        framework = loaded.framework
        framework.keep_programs(cache_dir)  # learners need the same ones
        model = framework.make_model(loaded.task, settings, plan.mesh)
        batches = _first_batches(loaded, settings)
        model.check(batches[0])
        framework.check_values(model)
        fragments = model.fragments()
        if plan.fragment_map is not None and settings.continues is not None:
            check_same_map(fragments, plan.fragment_map, settings.continues.run)
        if plan.init is not None:
            weights.begin(plan.init, model, fragments, plan.names, cache_dir)
        _check_step(loaded, settings, model, batches[0])
        model.check_evaluation()
        task, processes = loaded.task, None
        if plan.processes is not None and plan.processes > 1:
            mesh = plan.mesh or MeshSettings()
            processes = framework.examine_processes(task, settings, mesh, plan.processes, batches[0])
        found = _found(settings, task.tokens_per_batch, units_of(task)["loss"], getattr(task, "mix", None), framework)
        return Checked(found, loaded, model, batches, processes)


def _first_batches(loaded: LoadedTask, settings: RunSettings) -> list[Any]:
    """Return the first two batches, after a look at those behind them.

    Raises:
        SettingsError: they end, or one is of other shapes, if the framework needs the same ones.
    """
    kept, began_s = list[Any](), time.monotonic()
    with members.users_errors(settings.task, loaded.task.batches):
        for index, batch in enumerate(first_batches(loaded.task, settings)):
            if index < 2:
                kept.append(batch)
            loaded.framework.check_alike(loaded.task, kept[0], batch)
            if index and (index + 1 == LOOK_BATCHES or time.monotonic() - began_s > LOOK_S):
                break
    return kept


def _check_step(loaded: LoadedTask, settings: RunSettings, model: Any, batch: Any) -> None:
    """Check that a step can be taken: that devices have room for it, and that loss and gradients are numbers.

    Raises:
        SettingsError: it cannot.
    """
    if math.isfinite(loaded.framework.rehearse(model, batch)):
        return
    loss, paths = model.measured(batch)
    cause = f", and its gradient of {paths[0]!r} is NaN or infinity" if math.isfinite(loss) and paths else ""
    reason = loaded.framework.find_cause(loaded.task, settings, model, batch)
    cause += f", since {reason}" if reason else ""
    raise SettingsError(
        f"task: loss() of the first batch is {loss:g}{cause}: no step is taken with NaN or "
        f"infinity{members.place(loaded.task.loss)}"
    )


def _found(settings: RunSettings, step_tokens: int, units: str | None, data: object, framework: Framework) -> TaskFacts:
    """Return the facts of a task, after those of a mix: the run must not go over a source too often."""
    if not isinstance(data, Mix | Chats):
        return TaskFacts(step_tokens, units, framework.name, None)
    data.check_epochs(settings)
    notes = tuple(data.notes()) if isinstance(data, Chats) else ()
    return TaskFacts(step_tokens, units, framework.name, data.settings, notes)


def _plan(request: dict[str, Any]) -> PlannedRun:
    return PlannedRun(
        settings=parse(RunSettings, request["settings"], "the run"),
        data=request["data"],
        mesh=None if request["mesh"] is None else parse(MeshSettings, request["mesh"], "mesh"),
        processes=request["processes"],
        init=request["init"],
        names=None if request["names"] is None else Path(request["names"]),
        fragment_map=None if request["map"] is None else unpack_map(bytes.fromhex(request["map"])),
    )


def _main() -> None:
    request = json.load(sys.stdin)
    plan = _plan(request)
    made = checked(plan) if request["whole"] else None
    found = check(plan) if made is None else made.found
    mix = None if found.mix is None else found.mix.model_dump()
    packed = None if made is None else made.model.fragments().pack().hex()
    facts: dict[str, Any] = {
        "step_tokens": found.step_tokens,
        "units": found.units,
        "framework": found.framework,
        "mix": mix,
        "map": packed,
    }
    facts["notes"] = found.notes
    print(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
