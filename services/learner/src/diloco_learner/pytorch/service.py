"""``diloco-torch-learner``: a learner, or an evaluator, over a ``torch.nn.Module``; otherwise as ``diloco-learner``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import torch

from diloco.core.run import tape
from diloco.errors import SettingsError
from diloco.process import observe
from diloco.service import skeleton as service
from diloco.settings.run import TaskSettings
from diloco.settings.service import MeshSettings, TorchLearnerSettings
from diloco_learner.api.members import users_errors
from diloco_learner.pytorch.island import TorchIsland
from diloco_learner.pytorch.task import load_task
from diloco_learner.run import alone
from diloco_learner.run.process import begin_with_file, begun, until_asked
from diloco_learner.task_api import first_batch

PROGRAM = "diloco-torch-learner"


def machine() -> tape.Machine:
    """Return all that this process's bits depend on besides its program."""
    threads = torch.get_num_threads()
    return tape.Machine.of(f"{tape.TORCH} {torch.__version__}, {platform.machine()}", str(threads), "")


def own_task(settings: TorchLearnerSettings, run: TaskSettings) -> TaskSettings:
    """Return a run's task settings with the name of the task by which this learner makes the model."""
    return run if settings.task is None else run.model_copy(update={"name": settings.task})


def work(settings: TorchLearnerSettings, stopping: Callable[[], bool]) -> None:
    """Join the run and train, or evaluate, until it is over or this process is asked to end."""
    if settings.mesh != MeshSettings() or settings.processes.count != 1:
        raise SettingsError("mesh, processes: a torch learner is one process, and the device is its module's: leave them out")
    with begun(settings, stopping) as process:
        process.exporter.starting = "its task to be created"
        run = process.run.created
        own = run.model_copy(update={"task": own_task(settings, run.task)})
        with users_errors(own.task):
            task = load_task(own.task, settings.data)
            island = TorchIsland(task, own)
            first = first_batch(task, own)
        fragments = island.fragments()
        begin_with_file(process, island, fragments)
        process.log.info("island_ready", platform="torch", threads=torch.get_num_threads(), version=torch.__version__)
        member = alone.make_member(process, fragments)
        if settings.role == "learner":
            member.admission.check_batch(task.tokens_per_batch)
            island.rehearse(first)
        process.exporter.starting = "the run's log to be read"
        alone.work(process, island, member, task, task.tokens_per_batch, [machine()])


def _main() -> int:
    settings = service.parse_settings(TorchLearnerSettings, PROGRAM)
    return until_asked(lambda stopping: work(settings, stopping))


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, PROGRAM))


if __name__ == "__main__":
    main()
