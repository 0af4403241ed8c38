"""``diloco-torch-learner``: a learner, or an evaluator, over a ``torch.nn.Module``; otherwise as ``diloco-learner``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from diloco.process import observe
from diloco.service import skeleton as service
from diloco.settings.service import TorchLearnerSettings
from diloco_learner.pytorch.beginning import begin, machine
from diloco_learner.pytorch.processes import together
from diloco_learner.pytorch.processes.process_mesh import OneProcess
from diloco_learner.run import alone
from diloco_learner.run.process import LearnerProcess, begun, until_asked

PROGRAM = "diloco-torch-learner"


def _work_alone(process: LearnerProcess, settings: TorchLearnerSettings) -> None:
    """Train, or evaluate, as the only process of a learner."""
    found = begin(process, settings, OneProcess())
    island, task = found.island, found.task
    member = alone.make_member(process, found.fragments)
    if settings.role == "learner":
        member.admission.check_batch(task.tokens_per_batch)
        island.rehearse(found.first)
    process.exporter.starting = "the run's log to be read"
    alone.work(process, island, member, task, task.tokens_per_batch, [machine()])


def work(settings: TorchLearnerSettings, stopping: Callable[[], bool]) -> None:
    """Join the run and train, or evaluate, until it is over or this process is asked to end."""
    sizes = together.mesh_sizes(settings)
    with begun(settings, stopping) as process:
        if settings.processes.count == 1:
            _work_alone(process, settings)
        else:
            together.work(process, settings, sizes)


def _main() -> int:
    settings = service.parse_settings(TorchLearnerSettings, PROGRAM)
    return until_asked(lambda stopping: work(settings, stopping))


def main() -> None:
    """Console script."""
    code = observe.run_main(_main, PROGRAM)
    together.exit_from_torch(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
