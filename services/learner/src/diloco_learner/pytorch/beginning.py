"""The start of a process that computes with PyTorch, of a learner with any number of processes: its task and its model."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from diloco.core.run import tape
from diloco.core.tensors.fragments import FragmentMap
from diloco.settings.run import TaskSettings
from diloco.settings.service import TorchLearnerSettings
from diloco.storage.model_folder import ALLOW_CODE
from diloco_learner.api.members import users_errors
from diloco_learner.pytorch.island import TorchIsland
from diloco_learner.pytorch.processes.process_mesh import Processes
from diloco_learner.pytorch.task import TorchTask, load_task
from diloco_learner.run.process import LearnerProcess, begin_with_file
from diloco_learner.task_api import first_batch


@dataclass(frozen=True)
class TorchBeginning:
    """A learner's task, the model as this process has it, and the first batch of the first share."""

    task: TorchTask
    island: TorchIsland
    fragments: FragmentMap
    first: Any


def machine() -> tape.Machine:
    """Return all that this process's bits depend on besides its program."""
    threads = torch.get_num_threads()
    return tape.Machine.of(f"{tape.TORCH} {torch.__version__}, {platform.machine()}", str(threads), "")


def own_task(settings: TorchLearnerSettings, run: TaskSettings) -> TaskSettings:
    """Return a run's task settings with the task by which this learner makes the model, and where its files are here."""
    name = run.name if settings.task is None else settings.task
    options = run.options if settings.model is None else {**run.options, "model": settings.model}
    return run.model_copy(update={"name": name, "options": options})


def begin(process: LearnerProcess, settings: TorchLearnerSettings, processes: Processes) -> TorchBeginning:
    """Make the task and its model, spread over the ``processes`` of the learner; nothing is computed.

    Raises:
        SettingsError: the task is none, or its model cannot be trained so.
        DataError: its data is missing, unreadable or too short.
    """
    process.exporter.starting = "its task to be created"
    run = process.run.created
    own = run.model_copy(update={"task": own_task(settings, run.task)})
    if settings.allow_code:
        os.environ[ALLOW_CODE] = settings.allow_code  # a task has the run's settings, and this machine's owner decides
    with users_errors(own.task):
        task = load_task(own.task, settings.data)
        island = TorchIsland(task, own, processes)
        first = first_batch(task, own)
    fragments = island.fragments()
    begin_with_file(process, island, fragments)
    about = {"processes": processes.size} if processes.size > 1 else {}
    process.log.info("island_ready", platform="torch", threads=torch.get_num_threads(), version=torch.__version__, **about)
    return TorchBeginning(task, island, fragments, first)
