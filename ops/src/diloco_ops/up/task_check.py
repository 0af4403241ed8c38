"""A run's tasks, looked at before its services start: whether they can be trained, and by which frameworks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diloco.core.run.run_length import too_short
from diloco.core.tensors.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import AdmissionError, SettingsError
from diloco.service.rundir import RunDirectory
from diloco.settings.run import MixSettings, RunSettings
from diloco.settings.validation import parse
from diloco_ops.learner_programs import EVALUATOR, TORCH, program_of
from diloco_ops.reading.asking import ask
from diloco_ops.up.environment import learner_environment, mesh_of


def check_task(directory: RunDirectory, fragment_map: FragmentMap | None = None) -> RunDirectory:
    """Check that a run's tasks and data are fit to train, as its learners would find out too late; print if it is short.

    What its data leaves out is printed too.

    ``fragment_map``: of the run that this one continues, whose model it must be. Return the directory, which has the units of
    the loss then, where the task says them, its framework, the learners that compute with PyTorch, and its mix of data, if that
    is one.

    Raises:
        ServiceFailed: they are not; the message and the exit code are a learner's.
        SettingsError: a torch learner's task is none of PyTorch, or a learner is to have several devices, which its framework
            does not allow.
        AdmissionError: its model is not the run's; the first differing tensor is named.
    """
    others = sorted({*(directory.torch or {}).values()} - {directory.settings.task.name})
    found = _found(directory, directory.settings, fragment_map, whole=bool(others))
    torch = dict(directory.torch or {})
    if found["framework"] == TORCH:
        torch = dict.fromkeys([*directory.learner_names, EVALUATOR], directory.settings.task.name) | torch
    for task in others:
        own = directory.settings.model_copy(update={"task": directory.settings.task.model_copy(update={"name": task})})
        its = _found(directory, own, fragment_map, whole=True)
        if its["framework"] != TORCH:
            raise SettingsError(f"--torch: {task} makes a {its['framework']} task, expected a PyTorch task, with module()")
        try:
            check_same_map(unpack_map(bytes.fromhex(its["map"])), unpack_map(bytes.fromhex(found["map"])), directory.name)
        except AdmissionError as error:
            raise AdmissionError(f"--torch: {task}: {error}") from None
    for framework in {found["framework"], *([TORCH] if torch else [])}:
        _check_shape(directory, framework)
    if directory.torch_processes is not None and not torch:
        raise SettingsError(
            f"--torch-processes {directory.torch_processes}: no learner of this run computes with PyTorch, because its task "
            f"is a {found['framework']} task: leave the option out (for JAX: --processes-per-learner)"
        )
    short = too_short(directory.settings, found["step_tokens"])
    if short is not None:
        print(f"note: {short}", file=sys.stderr)
    for note in found["notes"]:
        print(f"note: {note}", file=sys.stderr)
    mix = None if found["mix"] is None else parse(MixSettings, found["mix"], "task.mix")
    settings = directory.settings.with_mix(mix)
    return replace(directory, units=found["units"], framework=found["framework"], torch=torch or None, settings=settings)


def _check_shape(directory: RunDirectory, framework: str) -> None:
    """Check that learners of a framework can have the devices and processes that a run's are to have.

    Raises:
        SettingsError: they cannot.
    """
    if not program_of(framework).one_process:
        return
    if directory.devices_per_learner or directory.processes_per_learner:
        several = " (--torch-processes starts several)" if framework == TORCH else ""
        raise SettingsError(
            f"--devices-per-learner, --processes-per-learner: a learner of {framework} is a single process, and its task "
            f"chooses the device: leave these options out{several}"
        )
    if directory.least_processes is not None:
        raise SettingsError(
            f"--least-processes: a learner of {framework} has a fixed number of processes: leave this option out"
        )


def _found(directory: RunDirectory, settings: RunSettings, fragment_map: FragmentMap | None, *, whole: bool) -> dict[str, Any]:
    """Return the facts that ``diloco_learner.check`` finds of the task of these settings; ``whole``: with its fragment map."""
    devices = directory.devices_per_learner
    environment = learner_environment(0, len(directory.learner_names), devices)
    mesh = mesh_of(devices, 1 if devices is None else directory.replicas)
    request = {
        "settings": settings.model_dump(), "data": directory.data, "mesh": mesh, "processes": directory.torch_processes,
        "init": directory.init, "names": directory.init_names,
        "map": None if fragment_map is None else fragment_map.pack().hex(), "whole": whole,
    }  # fmt: skip
    return ask("check", request, environment)


def torch_tasks(items: Sequence[str], directory: RunDirectory) -> dict[str, str]:
    """Return the torch tasks of learners that compute with PyTorch in a run whose task is one of another framework."""
    tasks = {}
    for item in items:
        name, _, task = item.partition("=")
        if name not in directory.learner_names or ":" not in task:
            names = directory.learner_names
            raise SettingsError(
                f"--torch {item}: expected LEARNER=MODULE:MAKE with a learner of {names[0]} to {names[-1]}, for example "
                "learner-1=torch_gpt:make"
            )
        tasks[name] = task
    return tasks
